"""Engines in processes of their own, on one GPU or two, with the real services and loops; this process is the router
and carries all messages.

A process is forked before anybody touches the device, so each has a CUDA context to itself. It ends when it is told
None.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, cast

from bench.gpu.answers import Answers
from bench.gpu.device_exports import as_tensor, export, importing, open_device
from bench.gpu.generation import engine_config
from bench.gpu.models import BLOCK_SIZE, NUM_BLOCKS, gpu_runner, small_model
from bench.gpu.setting import Setting
from decode_pool.service import DecodeService
from engine.loop import EngineLoop, Service
from engine.models.config import kv_layout_fields
from engine.parts import assemble
from engine.runners.cuda_warmup import warm_up
from engine.runners.paged_cache import block_bytes
from kv_transfer.config import TransferConfig
from kv_transfer.connecting import ThreadConnector
from kv_transfer.device.device_pool import DevicePool
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import NONCE_BYTES
from prefill_pool.service import PrefillService
from protocol.delivery import Incoming, Outgoing
from protocol.messages import ROUTER_ID, Address, Envelope, PoolName, ReplicaStatus
from protocol.router_link import LinkConfig
from router.admission import ClientRequest
from router.config import RouterConfig
from router.request import Delivered, Ended
from router.router import Router

STATUS_S = 0.2
TICK_S = 0.05
TIMEOUT_S = 60.0
FAILED = 70
"""Exit status of an engine whose loop has failed."""

Wire: TypeAlias = "Connection[Any, Any]"  # generic for type checkers only
fork = multiprocessing.get_context("fork")


class Engine(NamedTuple):
    """What an engine's process is told. `name`: of its shared memory."""

    setting: Setting
    kind: str
    role: PoolName
    address: Address
    name: str
    gpu: int
    """Number of the GPU that it sees."""


class Deployment:
    """`gpus`: of the engines, by role, "prefill" and "decode" or "decode" alone. `answer` blocks until every request
    has ended.
    """

    def __init__(self, setting: Setting, kind: str, gpus: Mapping[PoolName, int], name: str) -> None:
        address = Address(ROUTER_ID, 1)
        config = RouterConfig(
            disaggregation="strict" if "prefill" in gpus else "colocated",
            status_interval_s=STATUS_S,
            replica_timeout_s=TIMEOUT_S,
        )
        self._router = Router(config, address=address, clock=time.monotonic, seed=1)
        self._incoming, self._outgoing = Incoming(address, time.monotonic), Outgoing(address)
        self.statuses: dict[str, ReplicaStatus] = {}
        """The newest of each engine."""
        self._wires: dict[Address, Wire] = {}
        self._processes = []
        for epoch, (role, gpu) in enumerate(gpus.items(), start=2):
            engine = Engine(setting, kind, role, Address(f"{role}-0", epoch), f"{name}-{role}", gpu)
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_run_engine, args=(engine, theirs), daemon=True)
            process.start()
            theirs.close()
            self._wires[engine.address] = ours
            self._processes.append(process)

    def __enter__(self) -> Self:
        for address in self._wires:
            self._router.replica_started(address)
        self._pump_until(lambda: len(list(self._router.replicas())) == len(self._wires))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return  # whoever still lives is killed with the section
        for wire in self._wires.values():
            wire.send(None)
        for process in self._processes:
            process.join(TIMEOUT_S)
            if process.exitcode != 0:
                raise RuntimeError(f"an engine's process ended with {process.exitcode}")

    def answer(self, requests: Iterable[ClientRequest]) -> Answers:
        """All are submitted at once. Raises RuntimeError for the first that fails."""
        answers: Answers = {}
        ended: dict[str, Ended] = {}
        for request in requests:
            answers[request.request_id] = []
            self._router.submit(request)

        def take() -> bool:
            for event in self._router.events:
                if isinstance(event, Delivered):
                    for request_id, token_ids in event.rows():
                        answers[request_id] += token_ids
                elif event.error is not None:
                    raise RuntimeError(f"{event.request_id}: {event.error}")
                else:
                    ended[event.request_id] = event
            self._router.events.clear()
            return len(ended) == len(answers)

        self._pump_until(take)
        return answers

    def settled(self, replica_id: str, counter: str, least: float) -> ReplicaStatus:
        """The first status of that engine whose counter has got so far."""
        self._pump_until(lambda: replica_id in self.statuses and self.statuses[replica_id].counters[counter] >= least)
        return self.statuses[replica_id]

    def _pump_until(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > until:
                raise RuntimeError(f"the engines did not get there within {TIMEOUT_S:g} s")
            for wire in cast(list[Wire], wait(list(self._wires.values()), TICK_S)):
                try:
                    self._carry(wire.recv())
                except EOFError:
                    raise RuntimeError("an engine's process has ended: its error is on standard error") from None
            self._router.tick()
            for receiver, message in self._router.outbox:
                self._carry(self._outgoing.envelope(receiver, message))
            self._router.outbox.clear()

    def _carry(self, envelope: Envelope) -> None:
        if envelope.receiver.replica_id != ROUTER_ID:
            self._wires[envelope.receiver].send(envelope)
            return
        for ready in self._incoming.accept(envelope):
            if isinstance(ready.message, ReplicaStatus):
                self.statuses[ready.sender.replica_id] = ready.message
            self._router.handle(ready)


def _run_engine(engine: Engine, wire: Wire) -> None:
    """Body of a process."""
    engine.setting.see_only(engine.gpu)
    with ExitStack() as resources:
        loop = _build(engine, wire.send, resources)
        loop.start()
        resources.callback(loop.stop)
        while (envelope := wire.recv()) is not None:
            loop.deliver(envelope)


def _build(engine: Engine, send: Callable[[Envelope], None], resources: ExitStack) -> EngineLoop:
    """As `cluster/build.py` does, without what it needs beside torch. The decode engine uses graphs and launches steps
    ahead.
    """
    setting, role = engine.setting, engine.role
    graph_sizes = setting.size((1, 2, 4, 8, 16), (2,)) if role == "decode" else ()
    config = engine_config(setting, depth=2 if role == "decode" else 1, graph_sizes=graph_sizes)
    model = small_model(setting, setting.device)
    named = replace(model.config, fingerprint=f"random-{setting.seed}")
    layout, size = KVLayout(**kv_layout_fields(named, "float32", BLOCK_SIZE)), block_bytes(model, BLOCK_SIZE)
    device = open_device(setting, f"{engine.name}-memory")
    parts_of = partial(
        assemble,
        config,
        role=role,
        address=engine.address,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=0,
        fingerprint=layout.fingerprint(),
        link=LinkConfig(status_interval_s=STATUS_S, router_timeout_s=TIMEOUT_S),
        clock=time.monotonic,
    )
    loops: list[EngineLoop] = []
    service: Service
    if role == "prefill":
        exported = export(engine.kind, device, engine.name, NUM_BLOCKS, size)
        resources.callback(exported.close)
        parts, cache = parts_of(endpoint=exported.endpoint), exported.cache
        leases = LeaseTable(exported.words, engine.address.epoch)
        service = PrefillService(parts, leases=leases, config=TransferConfig(), cache=cache)
    else:
        pool = DevicePool(device, bytes(NONCE_BYTES), num_blocks=NUM_BLOCKS, block_bytes=size)
        resources.callback(pool.close)
        parts, cache = parts_of(), pool.cache

        def wake() -> None:
            loops[0].wake()

        connector = ThreadConnector(importing(engine.kind, setting, cache, wake), wake)
        resources.callback(connector.close)
        service = DecodeService(parts, transport=connector, config=TransferConfig(), cache=cache)
    runner = gpu_runner(model, as_tensor(cache.tensor).view(-1), graph_sizes)
    warm_up(runner, config)
    loops.append(parts.loop(service, runner, send, on_failure=_end_process, strict=True))
    return loops[0]


def _end_process(failure: BaseException) -> None:
    """As an engine does that nobody can trust any more; the loop has logged why."""
    os._exit(FAILED)
