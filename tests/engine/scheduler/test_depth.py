"""Two steps in flight, through the services of both pools, real loops and shared memory, give the same tokens as one
step at a time, whatever goes wrong.
"""

import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import pytest
import torch

from cluster import build
from cluster.config import load
from decode_pool.service import DecodeService
from engine.loop import EngineLoop
from engine.models.loading import build_model
from engine.runner import Batch, StepOutput
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_tokens
from engine.runners.torch_cpu import TorchCPURunner
from prefill_pool.service import PrefillService
from protocol.delivery import Incoming, Outgoing
from protocol.messages import ROUTER_ID, Address, Envelope, SamplingParams
from router.admission import ClientRequest
from router.request import Delivered, Ended
from router.router import Router
from tests.engine.test_sampling_flow import Engine
from tests.engine.tiny_llama import TINY, random_tensors
from tests.hang import HANG_S

ROUTER, PREFILL, DECODE = Address(ROUTER_ID, 1), Address("prefill-0", 2), Address("decode-0", 3)
NUM_REQUESTS = 24


class Cell:
    """One router on the thread of the test, and one engine of each pool in threads of its own."""

    def __init__(self, loops: dict[Address, EngineLoop], inbox: "queue.SimpleQueue[Envelope]") -> None:
        self.loops, self._inbox = loops, inbox
        config = load(
            None, ["runner=arithmetic", "router.replica_timeout_s=50", "router.min_disaggregated_tokens=12"]
        ).router
        self.router = Router(config, address=ROUTER, clock=time.monotonic, seed=0)
        self._incoming, self._outgoing = Incoming(ROUTER, time.monotonic), Outgoing(ROUTER)
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self._cancels: dict[str, int] = {}
        for address in loops:
            self.router.replica_started(address)
        while sum(1 for replica in self.router.replicas() if replica.hello is not None) < len(loops):
            self._turn()

    def submit(self, request: ClientRequest, *, cancel_after: int | None = None) -> None:
        self.router.submit(request)
        self.received[request.request_id] = []
        if cancel_after is not None:
            self._cancels[request.request_id] = cancel_after

    def run(self) -> None:
        deadline = time.monotonic() + HANG_S
        while len(self.ended) < len(self.received):
            assert time.monotonic() < deadline, f"only {len(self.ended)} of {len(self.received)} have ended"
            self._turn()
        for loop in self.loops.values():
            assert loop.wait_idle(HANG_S)

    def _turn(self) -> None:
        self.router.tick()
        for receiver, message in self.router.outbox:
            self.loops[receiver].deliver(self._outgoing.envelope(receiver, message))
        self.router.outbox.clear()
        try:
            item = self._inbox.get(timeout=0.05)
        except queue.Empty:
            return
        for envelope in self._incoming.accept(item):
            self.router.handle(envelope)
        for event in self.router.events:
            if isinstance(event, Delivered):
                for request_id, token_ids in event.rows():
                    self.received[request_id] += token_ids
            else:
                self.ended[event.request_id] = event
        self.router.events.clear()
        for name, count in list(self._cancels.items()):
            if len(self.received[name]) >= count:
                self.router.cancel(name)
                del self._cancels[name]


@contextmanager
def cell(prefix: str, *overrides: str) -> Iterator[Cell]:
    knobs = [
        "prefill.block_size=4",
        "decode.block_size=4",
        "prefill.num_blocks=64",
        "prefill.max_num_batched_tokens=16",
        "prefill.max_num_seqs=16",
    ]
    config = load(None, ["runner=arithmetic", *knobs, *overrides])
    inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
    loops: dict[Address, EngineLoop] = {}

    def send(envelope: Envelope) -> None:
        if envelope.receiver == ROUTER:
            inbox.put(envelope)
        else:
            loops[envelope.receiver].deliver(envelope)

    with ExitStack() as resources:
        loops[PREFILL] = build.build_prefill(config, PREFILL, send, prefix, resources)
        loops[DECODE] = build.build_decode(config, DECODE, send, prefix, resources)
        for loop in loops.values():
            loop.start()
            resources.callback(loop.stop)
        yield Cell(loops, inbox)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_same_tokens_through_handoffs_aborts_preemption_and_failed_steps(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = num_ahead = 0
    execute = ArithmeticRunner.execute

    def counted(self: ArithmeticRunner, batch: Batch) -> StepOutput:
        nonlocal num_steps, num_ahead
        num_steps += 1
        num_ahead += batch.pending is not None and bool(batch.pending.any())
        if num_steps in (9, 40):
            raise RuntimeError("planted")
        return execute(self, batch)

    monkeypatch.setattr(ArithmeticRunner, "execute", counted)
    flag = str(asynchronous).lower()
    knobs = [f"prefill.async_scheduling={flag}", f"decode.async_scheduling={flag}", "decode.num_blocks=24"]
    with cell(f"twopass-test-depth-{flag}-", *knobs) as c:
        expected, cancelled = {}, set()
        for index in range(NUM_REQUESTS):
            prompt, seed = [index + 1] * (4 + 3 * (index % 5)), index if index % 2 else 0
            name = f"r{index}"
            sampling = SamplingParams(temperature=1.0, seed=seed) if seed else SamplingParams()
            expected[name] = expected_tokens(prompt, 30, seed=seed)
            request = ClientRequest(
                request_id=name, prompt_token_ids=np.array(prompt, np.int32), max_tokens=30, sampling=sampling
            )
            if index % 6 == 5:
                cancelled.add(name)
            c.submit(request, cancel_after=3 if name in cancelled else None)
        c.run()
        for name, answer in expected.items():
            if name in cancelled:
                assert c.received[name] == answer[: len(c.received[name])]
            else:
                assert (c.ended[name].error, c.received[name]) == (None, answer)
        assert max(ended.attempts for ended in c.ended.values()) > 1, "the failed steps were felt"
        decode, prefill = cast(DecodeService, c.loops[DECODE]._service), cast(PrefillService, c.loops[PREFILL]._service)
        assert decode.counters["preemptions_recompute"] > 0
        assert decode.counters["transferred_tokens"] > 0
        assert decode.counters["requests"] > prefill.counters["requests"] > 0, "some with a handoff, some alone"
        decode.check_idle()
        prefill.check_idle()
    assert (num_ahead > 20) == asynchronous


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.2)],
    ids=["greedy", "sampled"],
)
def test_a_llama_takes_the_pending_token_from_its_own_last_step(sampling: SamplingParams) -> None:
    answers = []
    for depth in (1, 2):
        model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
        cache = torch.zeros(64 * TINY.num_layers * 2 * TINY.num_kv_heads * 4 * TINY.head_dim).view(torch.uint8)
        engine = Engine(TorchCPURunner(model, cache, block_size=4, num_threads=1), depth=depth)
        for index in range(3):
            engine.add(f"r{index}", sampling, prompt=[index + 1] * (index + 4), max_tokens=12)
        engine.run()
        answers.append(engine.answers)
    assert answers[0] == answers[1]
    assert all(len(answer) == 12 for answer in answers[0].values())
