"""The loop's shell: order, stepping, ticking while a step runs, failures, gaps, drain. Nothing here waits for time to
pass.

The file is longer than 300 lines because all of it rests on the scripted service and runner at its head.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from engine.loop import EngineLoop, Service
from engine.runner import Batch, Runner, StepOutput
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_tokens
from protocol.clock import VirtualClock
from protocol.delivery import Outgoing
from protocol.errors import EngineStalled, ProtocolError, PullFailed
from protocol.messages import (
    AbortRequest,
    Address,
    Drain,
    EngineRequest,
    Envelope,
    KVRenew,
    Message,
    PeerGap,
    RequestKey,
    RouterStatus,
    SamplingParams,
    StepTokens,
)
from tests.hang import HANG_S

HERE = Address("decode-0", 3)
ROUTER = Address("router", 1)
PREFILL = Address("prefill-0", 2)
BLOCK_SIZE, MAX_LEN = 4, 64
TIMEOUT_S = HANG_S


def request(number: int, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        key=RequestKey(1, f"r{number}", 1),
        request_number=number,
        role="colocated",
        peer=None,
        prompt_token_ids=np.array(prompt, np.int32),
        offset=0,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
    )


class FakeService:
    """Runs whatever it is asked, all at once, one private stretch of blocks per request."""

    def __init__(self, num_rows: int = 8) -> None:
        self.outbox: list[tuple[Address, Message]] = []
        self.token_ids = np.zeros((num_rows, MAX_LEN), np.int32)
        self.block_tables = np.arange(1, 1 + num_rows * MAX_LEN // BLOCK_SIZE, dtype=np.int32).reshape(num_rows, -1)
        self.running: dict[int, tuple[EngineRequest, int]] = {}
        """row: (request, tokens known)"""
        self.flying: list[list[int]] = []
        self.handled: list[Envelope] = []
        self.errors: list[str] = []
        self.answers: dict[int, list[int]] = {}
        self.num_router_gone = 0
        self.ticked = threading.Semaphore(0)
        self.threads: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self.running and not self.flying

    def handle(self, envelope: Envelope) -> None:
        self.threads.add(threading.current_thread().name)
        self.handled.append(envelope)
        match envelope.message:
            case EngineRequest() as asked:
                self.token_ids[asked.request_number, : len(asked.prompt_token_ids)] = asked.prompt_token_ids
                self.running[asked.request_number] = (asked, len(asked.prompt_token_ids))
                self.answers[asked.request_number] = []
            case Drain():
                self.running.clear()

    def tick(self) -> None:
        self.ticked.release()

    def schedule(self) -> Batch | None:
        rows = [row for row in self.running if not any(row in flying for flying in self.flying)]
        if not rows:
            return None
        self.flying.append(rows)
        known = np.array([self.running[row][1] for row in rows], np.int32)
        computed = np.array([known[i] - 1 if self.answers[row] else 0 for i, row in enumerate(rows)], np.int32)
        return Batch(
            step=0,
            rows=np.array(rows, np.int32),
            num_scheduled=known - computed,
            num_computed=computed,
            sample=np.ones(len(rows), np.bool_),
            token_ids=self.token_ids,
            block_tables=self.block_tables,
        )

    def commit(self, output: StepOutput) -> None:
        assert output.seconds > 0
        for i, row in enumerate(self.flying.pop(0)):
            if row not in self.running:
                continue
            asked, known = self.running[row]
            self.token_ids[row, known] = output.token_ids[i, 0]
            self.answers[row].append(int(output.token_ids[i, 0]))
            self.running[row] = (asked, known + 1)
            if len(self.answers[row]) == asked.max_tokens:
                del self.running[row]
            self.outbox.append((ROUTER, tokens(row, self.answers[row][-1])))

    def step_failed(self, error: str) -> None:
        self.errors.append(error)
        for row in self.flying.pop(0):
            del self.running[row]

    def router_gone(self) -> None:
        self.num_router_gone += 1


def tokens(request_number: int, token_id: int) -> StepTokens:
    one = np.ones(1, np.int32)
    return StepTokens(
        router_epoch=1,
        request_numbers=np.array([request_number]),
        attempts=one,
        offsets=one,
        counts=one,
        token_ids=one * token_id,
    )


def arithmetic() -> ArithmeticRunner:
    return ArithmeticRunner(
        np.zeros((1 + 8 * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE), np.int64), step_seconds=lambda _: 1e-3
    )


class GatedRunner:
    """Says that a step has begun, and finishes it when allowed; what it raises is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._inner, self._error = arithmetic(), error

    def execute(self, batch: Batch) -> StepOutput:
        self.begun.release()
        assert self.allowed.acquire(timeout=TIMEOUT_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._inner.execute(batch)


@contextmanager
def running(
    service: Service,
    runner: Runner,
    *,
    clock: Callable[[], float] | None = None,
    asynchronous: bool = False,
    on_failure: Callable[[BaseException], None] | None = None,
    strict: bool = False,
) -> Iterator[tuple[EngineLoop, "queue.SimpleQueue[Envelope]"]]:
    sent: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
    loop = EngineLoop(
        service,
        runner,
        address=HERE,
        clock=clock or VirtualClock(),
        send=sent.put,
        asynchronous=asynchronous,
        on_failure=on_failure,
        strict=strict,
    )
    loop.start()
    try:
        yield loop, sent
    finally:
        loop.stop()


def drained(sent: "queue.SimpleQueue[Envelope]") -> list[Envelope]:
    return [sent.get_nowait() for _ in range(sent.qsize())]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_delivered_in_any_order_are_answered(asynchronous: bool) -> None:
    service, router = FakeService(), Outgoing(ROUTER)
    envelopes = [router.envelope(HERE, request(i, list(range(i, 2 * i + 3)), 5 + i)) for i in range(6)]
    with running(service, arithmetic(), asynchronous=asynchronous) as (loop, sent):
        for envelope in [*envelopes[::-1], envelopes[2]]:
            loop.deliver(envelope)
        assert loop.wait_idle(TIMEOUT_S)
    assert [envelope.seq for envelope in service.handled] == list(range(6))
    assert service.answers == {i: expected_tokens(range(i, 2 * i + 3), 5 + i) for i in range(6)}
    assert service.threads == {"decode-0-loop"}
    out = drained(sent)
    assert [envelope.seq for envelope in out] == list(range(sum(5 + i for i in range(6))))
    assert {(envelope.sender, envelope.receiver) for envelope in out} == {(HERE, ROUTER)}


def test_the_loop_handles_and_ticks_while_a_step_runs() -> None:
    service, runner, router = FakeService(), GatedRunner(), Outgoing(ROUTER)
    with running(service, runner) as (loop, _):
        loop.deliver(router.envelope(HERE, request(0, [1, 2, 3], 1)))
        assert runner.begun.acquire(timeout=TIMEOUT_S)
        while service.ticked.acquire(blocking=False):
            pass
        assert service.ticked.acquire(timeout=TIMEOUT_S)
        loop.deliver(router.envelope(HERE, AbortRequest(key=RequestKey(1, "other", 1), reason="client")))
        loop.wake()
        while len(service.handled) < 2:
            assert service.ticked.acquire(timeout=TIMEOUT_S)
        assert not loop.wait_idle(0)
        runner.allowed.release()
        assert loop.wait_idle(TIMEOUT_S)
    assert service.answers[0] == expected_tokens([1, 2, 3], 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_batch_is_built_ahead_only_when_asynchronous(asynchronous: bool) -> None:
    service, runner, router = FakeService(), GatedRunner(), Outgoing(ROUTER)
    with running(service, runner, asynchronous=asynchronous) as (loop, _):
        loop.deliver(router.envelope(HERE, request(0, [1, 2, 3], 2)))
        assert runner.begun.acquire(timeout=TIMEOUT_S)
        loop.deliver(router.envelope(HERE, request(1, [4, 5], 2)))
        while len(service.handled) < 2:
            assert service.ticked.acquire(timeout=TIMEOUT_S)
        loop.wake()
        for _ in range(4):
            assert service.ticked.acquire(timeout=TIMEOUT_S)
        assert service.flying == ([[0], [1]] if asynchronous else [[0]])
        for _ in range(8):
            runner.allowed.release()
        assert loop.wait_idle(TIMEOUT_S)
    assert service.answers == {0: expected_tokens([1, 2, 3], 2), 1: expected_tokens([4, 5], 2)}


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), PullFailed("gone")])
def test_a_failed_step_fails_its_requests_and_the_loop_goes_on(error: Exception) -> None:
    service, runner, router = FakeService(), GatedRunner(error), Outgoing(ROUTER)
    for _ in range(2):
        runner.allowed.release()
    with running(service, runner) as (loop, _):
        loop.deliver(router.envelope(HERE, request(0, [1], 1)))
        assert loop.wait_idle(TIMEOUT_S)
        assert service.errors == [f"{type(error).__name__}: {error}"]
        loop.deliver(router.envelope(HERE, request(1, [1, 2], 1)))
        assert loop.wait_idle(TIMEOUT_S)
    assert service.answers[1] == expected_tokens([1, 2], 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_of_the_runner_ends_the_loop_visibly() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    runner = GatedRunner(IndexError("bug"))
    runner.allowed.release()
    with running(FakeService(), runner, on_failure=failures.put) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(0, [1], 1)))
        assert isinstance(failures.get(timeout=TIMEOUT_S), IndexError)
        assert isinstance(loop.failure, IndexError)
        assert not loop.wait_idle(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_of_the_service_ends_the_loop_visibly() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with running(FakeService(), arithmetic(), on_failure=failures.put) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(99, [1], 1)))
        assert isinstance(failures.get(timeout=TIMEOUT_S), IndexError)
    assert isinstance(loop.failure, IndexError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_does_not_end_ends_the_loop() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    service, runner, clock = FakeService(), GatedRunner(), VirtualClock()
    with running(service, runner, clock=clock, on_failure=failures.put) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(0, [1], 1)))
        assert runner.begun.acquire(timeout=TIMEOUT_S)
        clock.advance_to(120.0)
        loop.wake()
        for _ in range(2):
            assert service.ticked.acquire(timeout=TIMEOUT_S)
        assert loop.failure is None
        clock.advance_to(121.0)
        assert isinstance(failures.get(timeout=TIMEOUT_S), EngineStalled)
        assert isinstance(loop.failure, EngineStalled)
        runner.allowed.release()


class Launched:
    def __init__(self, runner: "LaunchingArithmetic", result: Callable[[], StepOutput]) -> None:
        self._runner, self._result = runner, result

    def result(self) -> StepOutput:
        self._runner.awaited.release()
        assert self._runner.allowed.acquire(timeout=TIMEOUT_S)
        return self._result()


class LaunchingArithmetic:
    """Says that a step was launched and is waited for; lets it end when allowed. Each of `errors` is raised by one
    launch, None by none.
    """

    def __init__(self, *errors: Exception | None, late: bool = False) -> None:
        """`late`: by `result` instead."""
        self.begun, self.awaited, self.allowed = (threading.Semaphore(0) for _ in range(3))
        self._inner, self._errors, self._late = arithmetic(), list(errors), late

    def execute(self, batch: Batch) -> StepOutput:
        raise AssertionError("a loop launches where it can")

    def launch(self, batch: Batch) -> Launched:
        self.begun.release()
        error = self._errors.pop(0) if self._errors else None
        if error is not None and not self._late:
            raise error
        output = self._inner.execute(batch)

        def result() -> StepOutput:
            if error is not None:
                raise error
            return output

        return Launched(self, result)


def test_the_next_step_is_launched_before_the_one_before_has_ended() -> None:
    service, runner, router = FakeService(), LaunchingArithmetic(), Outgoing(ROUTER)
    with running(service, runner, asynchronous=True) as (loop, _):
        for number in range(2):
            loop.deliver(router.envelope(HERE, request(number, [number + 1, 2], 3)))
            assert runner.begun.acquire(timeout=TIMEOUT_S)
        assert service.answers == {0: [], 1: []}
        for _ in range(6):
            runner.allowed.release()
        assert loop.wait_idle(TIMEOUT_S)
    assert service.answers == {number: expected_tokens([number + 1, 2], 3) for number in range(2)}


@pytest.mark.parametrize("late", [False, True], ids=["launch", "result"])
def test_a_launched_step_that_fails_does_so_in_its_turn(late: bool) -> None:
    service, runner, router = (
        FakeService(),
        LaunchingArithmetic(None, RuntimeError("out of memory"), late=late),
        Outgoing(ROUTER),
    )
    with running(service, runner, asynchronous=True) as (loop, _):
        for number in range(2):
            loop.deliver(router.envelope(HERE, request(number, [number + 1, 2], 1)))
            assert runner.begun.acquire(timeout=TIMEOUT_S)
        assert service.errors == []
        for _ in range(2):
            runner.allowed.release()
        assert loop.wait_idle(TIMEOUT_S)
    assert service.answers == {0: expected_tokens([1, 2], 1), 1: []}
    assert service.errors == ["RuntimeError: out of memory"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("late", [False, True], ids=["launch", "result"])
def test_a_device_that_is_lost_ends_the_loop_visibly(late: bool) -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    runner = LaunchingArithmetic(IndexError("lost"), late=late)
    runner.allowed.release()
    with running(FakeService(), runner, on_failure=failures.put) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(0, [1], 1)))
        assert isinstance(failures.get(timeout=TIMEOUT_S), IndexError)
    assert isinstance(loop.failure, IndexError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_launched_step_that_does_not_end_ends_the_loop() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    runner, clock = LaunchingArithmetic(), VirtualClock()
    with running(FakeService(), runner, clock=clock, on_failure=failures.put) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(0, [1], 1)))
        assert runner.awaited.acquire(timeout=TIMEOUT_S)
        clock.advance_to(121.0)
        assert isinstance(failures.get(timeout=TIMEOUT_S), EngineStalled)
        runner.allowed.release()


class PickyService(FakeService):
    """Knows no `KVRenew`."""

    def handle(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, KVRenew):
            raise ProtocolError("KVRenew is no message for this service")
        super().handle(envelope)


def test_a_message_that_no_table_lists_is_ignored_counted_and_harms_nobody() -> None:
    service, router = PickyService(), Outgoing(ROUTER)
    with running(service, arithmetic()) as (loop, _):
        loop.deliver(router.envelope(HERE, KVRenew(leases=())))
        loop.deliver(router.envelope(HERE, request(0, [1, 2], 3)))
        assert loop.wait_idle(TIMEOUT_S)
        assert loop.num_protocol_errors == 1 and loop.failure is None
    assert service.answers[0] == expected_tokens([1, 2], 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_strict_loop_ends_at_such_a_message() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with running(PickyService(), arithmetic(), on_failure=failures.put, strict=True) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, KVRenew(leases=())))
        assert isinstance(failures.get(timeout=TIMEOUT_S), ProtocolError)
    assert isinstance(loop.failure, ProtocolError)


def test_a_lasting_gap_is_reported_to_the_router_or_as_its_end() -> None:
    service, clock = FakeService(), VirtualClock()
    router, prefill = Outgoing(ROUTER), Outgoing(PREFILL)
    status = RouterStatus(router_epoch=1, seq=0, prefill_room_blocks=0, prefill_max_tokens=0)
    with running(service, arithmetic(), clock=clock) as (loop, sent):
        loop.deliver(router.envelope(HERE, status))
        prefill.envelope(HERE, status)
        router.envelope(HERE, status)
        loop.deliver(prefill.envelope(HERE, status))
        assert loop.wait_idle(TIMEOUT_S)
        clock.advance_to(6.0)
        loop.wake()
        gap = sent.get(timeout=TIMEOUT_S)
        assert (gap.receiver, gap.message) == (ROUTER, PeerGap(peer=PREFILL))
        loop.deliver(router.envelope(HERE, status))
        assert loop.wait_idle(TIMEOUT_S)
        clock.advance_to(12.0)
        while not service.num_router_gone:
            loop.wake()
            assert service.ticked.acquire(timeout=TIMEOUT_S)
    assert service.num_router_gone == 1
    assert len(service.handled) == 1


def test_drain_reaches_the_service() -> None:
    service, runner = FakeService(), GatedRunner()
    with running(service, runner) as (loop, _):
        loop.deliver(Outgoing(ROUTER).envelope(HERE, request(0, [1], 50)))
        assert runner.begun.acquire(timeout=TIMEOUT_S)
        loop.drain(deadline_s=1.0)
        runner.allowed.release()
        assert loop.wait_idle(TIMEOUT_S)
    assert service.handled[-1].message == Drain(deadline_s=1.0)


def test_messages_keep_the_order_of_the_outbox_per_receiver() -> None:
    service = FakeService()
    with running(service, arithmetic()) as (loop, sent):
        service.outbox += [
            (PREFILL, Drain(deadline_s=0.0)),
            (ROUTER, Drain(deadline_s=1.0)),
            (PREFILL, Drain(deadline_s=2.0)),
        ]
        loop.wake()
        out = [sent.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert [(e.receiver, e.seq, e.message) for e in out if e.receiver == PREFILL] == [
        (PREFILL, 0, Drain(deadline_s=0.0)),
        (PREFILL, 1, Drain(deadline_s=2.0)),
    ]
    assert [e.seq for e in out if e.receiver == ROUTER] == [0]
