"""A whole deployment in this process, without Ray and sockets: the real router core, and real engines in threads over
real shared memory.
"""

import queue
import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from cluster import build
from cluster.config import ClusterConfig
from cluster.cores import with_threads
from cluster.served_model import with_dtype
from engine.loop import EngineLoop
from protocol.delivery import Incoming, Outgoing
from protocol.messages import ROUTER_ID, Address, Envelope, SamplingParams
from router.admission import ClientRequest
from router.request import Delivered, Ended
from router.router import Router
from tests.hang import HANG_S

PREFIX = "twopass-test-local-"
TICK_S = 0.05


class LocalDeployment:
    """A deployment that answers requests. The test fails at the end if an engine leaves anything behind."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = with_dtype(with_threads(config, 1))
        self._prefix = f"{PREFIX}{secrets.token_hex(4)}-"
        self._resources = ExitStack()
        self._inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        address = Address(ROUTER_ID, 1)
        self.router = Router(config.router, address=address, clock=time.monotonic, seed=1)
        self._incoming, self._outgoing = Incoming(address, time.monotonic), Outgoing(address)
        self.loops: dict[Address, EngineLoop] = {}

    def __enter__(self) -> Self:
        epochs = count(2)
        pools = (
            ("prefill", self._config.prefill, build.build_prefill),
            ("decode", self._config.decode, build.build_decode),
        )
        for name, pool, make in pools:
            for index in range(pool.replicas):
                address = Address(f"{name}-{index}", next(epochs))
                self.loops[address] = make(self._config, address, self._send, self._prefix, self._resources)
        for address, loop in self.loops.items():
            loop.start()
            self._resources.callback(loop.stop)
            self.router.replica_started(address)
        until = time.monotonic() + HANG_S
        while len(list(self.router.replicas())) < len(self.loops):
            self._pump(until)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert all(loop.wait_idle(HANG_S) for loop in self.loops.values())
                assert not any(replica.in_flight for replica in self.router.replicas())
        finally:
            self._resources.close()
        assert list(Path("/dev/shm").glob(f"{self._prefix}*")) == []

    def answer(self, requests: Iterable[ClientRequest]) -> dict[str, list[int]]:
        """Submits all requests at once, waits until each has ended, and returns their tokens by request id."""
        answers: dict[str, list[int]] = {}
        ended: dict[str, Ended] = {}
        for request in requests:
            answers[request.request_id] = []
            self.router.submit(request)
        until = time.monotonic() + HANG_S
        while len(ended) < len(answers):
            self._pump(until)
            for event in self.router.events:
                if isinstance(event, Delivered):
                    for request_id, token_ids in event.rows():
                        answers[request_id] += token_ids
                else:
                    ended[event.request_id] = event
            self.router.events.clear()
        assert all(event.error is None for event in ended.values()), ended
        return answers

    def _send(self, envelope: Envelope) -> None:
        if envelope.receiver.replica_id == ROUTER_ID:
            self._inbox.put(envelope)
        else:
            self.loops[envelope.receiver].deliver(envelope)

    def _pump(self, until: float) -> None:
        """Hands the router a message if one comes within `TICK_S`, lets it tick, and sends what is in its outbox."""
        assert time.monotonic() < until, "the deployment did not get there in time"
        try:
            for envelope in self._incoming.accept(self._inbox.get(timeout=TICK_S)):
                self.router.handle(envelope)
        except queue.Empty:
            pass
        self.router.tick()
        for receiver, message in self.router.outbox:
            self._send(self._outgoing.envelope(receiver, message))
        self.router.outbox.clear()


def asked(name: str, prompt: Iterable[int], max_tokens: int, sampling: SamplingParams | None = None) -> ClientRequest:
    token_ids = np.array(list(prompt), np.int32)
    return ClientRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(ignore_eos=True),
    )
