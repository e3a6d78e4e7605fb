"""A whole deployment behind both doors in this process, without Ray: real engines in threads, and the router with its
gRPC and HTTP ports on an event loop in a thread.
"""

import asyncio
import secrets
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster import build
from cluster.config import ClusterConfig
from cluster.cores import with_threads
from cluster.served_model import serve_model, with_dtype
from engine.loop import EngineLoop
from protocol.delivery import Incoming, Outgoing
from protocol.messages import ROUTER_ID, Address, Envelope, Message
from router.core_loop import CoreLoop, OwnLink
from router.listeners import Listeners
from router.listening import Listening
from router.make_door import make_door
from router.router import Router
from tests.hang import HANG_S

PREFIX = "twopass-test-doors-"


class DoorsDeployment:
    """Serves `config`, whose ports are to be 0, until it is left. Its engines must be idle then."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = with_dtype(with_threads(config, 1))
        self._prefix = f"{PREFIX}{secrets.token_hex(4)}-"
        self._resources = ExitStack()
        self.loops: dict[Address, EngineLoop] = {}
        self.grpc_address = self.http_address = ""
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._events.run_forever)
        address = Address(ROUTER_ID, 1)
        self._incoming, self._outgoing = Incoming(address, time.monotonic), Outgoing(address)
        self.router = Router(self._config.router, address=address, clock=time.monotonic, seed=1)
        self._core = CoreLoop(self.router, self._config.router, send=self._post, clock=time.monotonic)

    def __enter__(self) -> Self:
        epochs = count(2)
        pools = (
            ("prefill", self._config.prefill, build.build_prefill),
            ("decode", self._config.decode, build.build_decode),
        )
        for name, pool, make in pools:
            for index in range(pool.replicas):
                address = Address(f"{name}-{index}", next(epochs))
                self.loops[address] = make(self._config, address, self._to_router, self._prefix, self._resources)
        self._thread.start()
        for loop in self.loops.values():
            loop.start()
            self._resources.callback(loop.stop)
        asyncio.run_coroutine_threadsafe(self._open(), self._events).result(HANG_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert all(loop.wait_idle(HANG_S) for loop in self.loops.values())
                assert self.router.num_open == 0
        finally:
            self._resources.close()
            asyncio.run_coroutine_threadsafe(self._close(), self._events).result(HANG_S)
            self._events.call_soon_threadsafe(self._events.stop)
            self._thread.join()
            self._events.close()
        assert list(Path("/dev/shm").glob(f"{self._prefix}*")) == []

    async def _open(self) -> None:
        config = self._config.router
        served = serve_model(self._config)
        model_dir = None if self._config.model is None else Path(self._config.model)
        self._door = make_door(OwnLink(self._core), config, model_dir, served.vocab_size, self._core.doors.totals)
        parts = Listeners(config).of_door(self._door, None)
        self._listening = Listening(list(parts.values()), config.tick_interval_s, self._core)
        ports = dict(zip(parts, await self._listening.start(), strict=True))
        self.grpc_address, self.http_address = (f"127.0.0.1:{ports[name]}" for name in ("grpc_port", "http_port"))
        for address in self.loops:
            self.router.replica_started(address)
        self._core.pump()
        async with asyncio.timeout(HANG_S):
            while len(list(self.router.replicas())) < len(self.loops):
                await asyncio.sleep(config.tick_interval_s)

    async def _close(self) -> None:
        await self._listening.stop(0.0)
        await self._door.close()

    def _to_router(self, envelope: Envelope) -> None:
        if envelope.receiver.replica_id == ROUTER_ID:
            self._events.call_soon_threadsafe(self._deliver, envelope)
        else:
            self.loops[envelope.receiver].deliver(envelope)

    def _deliver(self, envelope: Envelope) -> None:
        for message in self._incoming.accept(envelope):
            self._core.deliver(message)

    def _post(self, receiver: Address, message: Message) -> None:
        self.loops[receiver].deliver(self._outgoing.envelope(receiver, message))
