"""A core that does what a test says, and a server around it on a port that the system chooses."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from protocol.errors import NotFound, RequestCancelled, RequestError
from protocol.messages import Address, Envelope, FinishReason, Message, PoolName, TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.doors import Core
from router.frontdoor import FrontDoor, Model
from router.grpc_door import GrpcDoor
from router.listening import Listening
from router.policy import ReplicaView
from router.request import Delivered, Ended, Usage
from router.tokenizer import NumberTokenizer, Tokenizer
from router.tracing import Tracing
from tests.hang import HANG_S

VOCAB_SIZE = 1000


class ScriptedCore:
    """Runs `on_submit` for each request, which may raise or emit events. Puts calls into `calls`: (name, argument)."""

    def __init__(self, on_submit: Callable[["ScriptedCore", ClientRequest], None] | None = None) -> None:
        self.outbox: list[tuple[Address, Message]] = []
        self.events: list[Delivered | Ended] = []
        self.max_model_len = 10_000
        self.ready = True
        self.num_queued = self.num_open = 0
        self.engines: list[ReplicaView] = []
        self.drained_replicas: frozenset[str] = frozenset()
        self.calls: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.cancelled: list[str] = []
        self.tick_error: Exception | None = None
        self._on_submit = on_submit

    def submit(self, *requests: ClientRequest, door: Address) -> None:
        for request in requests:
            if self._on_submit is not None:
                self._on_submit(self, request)
            self.calls.put_nowait(("submit", request))

    def cancel(self, request_id: str) -> None:
        self.calls.put_nowait(("cancel", request_id))
        self.cancelled.append(request_id)
        self.end(request_id, None, RequestCancelled("cancelled by the client"))

    def stop(self, request_id: str) -> None:
        self.calls.put_nowait(("stop", request_id))
        self.end(request_id, "stop")

    def hold(self, door: Address) -> None:
        self.calls.put_nowait(("hold", door))

    def release(self, door: Address) -> None:
        self.calls.put_nowait(("release", door))

    @property
    def roles(self) -> dict[str, PoolName]:
        return {view.address.replica_id: view.hello.role for view in self.engines}

    def set_drained(self, replica_id: str, drained: bool) -> str:
        if replica_id not in self.roles:
            raise NotFound("replica", repr(replica_id), f"the engines are {', '.join(self.roles)}")
        self.drained_replicas ^= {replica_id}
        return "an effect" if drained else ""

    def restore_drained(self, replica_ids: Iterable[str]) -> None:
        self.drained_replicas |= {*replica_ids}

    def replicas(self) -> Iterator[ReplicaView]:
        return iter(self.engines)

    def handle(self, envelope: Envelope) -> None:
        self.calls.put_nowait(("handle", envelope))

    def tick(self) -> None:
        if self.tick_error is not None:
            raise self.tick_error

    def drain(self, deadline_s: float) -> None:
        self.calls.put_nowait(("drain", deadline_s))

    def tokens(self, request_id: str, *token_ids: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        self.events.append(
            Delivered([request_id], list(token_ids), [len(token_ids)], {request_id: logprobs} if logprobs else {})
        )

    def end(
        self, request_id: str, finish_reason: FinishReason | None = None, error: RequestError | None = None
    ) -> None:
        self.events.append(
            Ended(request_id, finish_reason, error, Usage(2, 1, 99), {"queue": 1e-6, "decode": 2e-6}, 1, "colocated")
        )


def echo(core: ScriptedCore, request: ClientRequest) -> None:
    """Answers a request with its own prompt."""
    core.tokens(request.request_id, *request.prompt_token_ids.tolist())
    core.end(request.request_id, "length")


class Serving:
    """What `scenario` hands to a test."""

    def __init__(
        self,
        loop: CoreLoop,
        door: FrontDoor,
        server: Listening,
        address: str,
        sent: list[tuple[Address, Message]],
        ports: dict[str, int] | None = None,
    ) -> None:
        self.core: Any = loop.core
        self.loop, self.door, self.server, self.address, self.sent = loop, door, server, address, sent
        self.ports = ports or {}
        self.pump = loop.pump

    def tick(self) -> None:
        """Tells the door what has changed in the core."""
        self.loop.doors.tick()
        self.pump()

    async def next_submit(self) -> ClientRequest:
        name, request = await self.core.calls.get()
        assert name == "submit", name
        assert isinstance(request, ClientRequest)
        return request


@asynccontextmanager
async def serving(
    core: Core, tokenizer: Tokenizer | None = None, tracing: Tracing | None = None, **knobs: Any
) -> AsyncIterator[Serving]:
    config = RouterConfig(**{"grpc_port": 0, **knobs})
    sent: list[tuple[Address, Message]] = []
    loop = CoreLoop(core, config, send=lambda address, message: sent.append((address, message)), clock=time.monotonic)
    door = FrontDoor(
        OwnLink(loop),
        tokenizer or NumberTokenizer(VOCAB_SIZE),
        config,
        Model("arithmetic", VOCAB_SIZE),
        clock=time.monotonic,
        totals=loop.doors.totals,
        tracing=tracing,
    )
    server = Listening([GrpcDoor(door, config)], config.tick_interval_s, loop)
    (port,) = await server.start()
    try:
        yield Serving(loop, door, server, f"127.0.0.1:{port}", sent)
    finally:
        await server.stop(0.0)
        await door.close()


def scenario(test: Callable[[Serving], Awaitable[None]], core: Core | None = None, **knobs: Any) -> None:
    """Runs `test` against a server around `core`."""

    async def main() -> None:
        async with serving(core or ScriptedCore(), **knobs) as served:
            await test(served)

    asyncio.run(asyncio.wait_for(main(), HANG_S))
