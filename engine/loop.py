"""The shell that drives one engine in a process: threads around a synchronous service and a runner.

1. Any thread calls `deliver(envelope)` or `wake()`; both only put into the inbox.
2. The loop thread owns the service. It sleeps on the inbox for at most `TICK_S`.
3. Envelopes pass `protocol.delivery`, which restores their order, and reach `service.handle`.
4. A finished step reaches `service.commit`, a failed one `service.step_failed`.
5. `service.tick` looks at deadlines, leases and timeouts at every turn, also while a step runs and while nothing does.
6. If the step thread is free (or, when asynchronous, has only one batch), `service.schedule` builds the next batch for
   it. The step thread executes batches and does nothing else. If the runner can launch, the step thread launches, and a
   third thread waits for the device, which always has orders while there is a batch.
7. Messages that the service left in its outbox are numbered and sent.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from engine.runner import Batch, LaunchingRunner, Runner, StepOutput
from protocol.clock import Clock
from protocol.delivery import Incoming, Outgoing
from protocol.errors import EngineStalled, ProtocolError, TwopassError
from protocol.log import label
from protocol.messages import ROUTER_ID, Address, Drain, Envelope, Message, PeerGap

TICK_S = 0.1

log = logging.getLogger(__name__)


class Service(Protocol):
    """A pool's control logic as the loop sees it. Only the loop thread calls it."""

    outbox: list[tuple[Address, Message]]
    """The loop empties it after every turn and keeps the order per receiver."""

    @property
    def idle(self) -> bool:
        """True while nothing waits, runs, is leased or is pulled."""
        ...

    def handle(self, envelope: Envelope) -> None: ...

    def tick(self) -> None: ...

    def schedule(self) -> Batch | None: ...

    def commit(self, output: StepOutput) -> None:
        """Takes the output of the oldest batch that was scheduled and is not committed."""
        ...

    def step_failed(self, error: str) -> None:
        """The oldest batch that is not committed could not be executed."""
        ...

    def router_gone(self) -> None: ...


class _StepFailed(NamedTuple):
    error: str


class _Signal(Enum):
    WAKE = auto()
    STOP = auto()


class EngineLoop:
    """The threads of one engine. A supervisor calls `start`, `drain` and `stop`; messages and signals come in through
    `deliver` and `wake`. `send` is called on the loop thread and must not block.

    If `asynchronous`, the next batch is built while the step before it runs, and starts right after it, before that
    step is committed. Then the service must allow `schedule` once more before a `commit`, and the runner must take
    batches with pending tokens. If `strict`, a message that the protocol does not list ends the loop, as tests want it.
    A step that runs longer than `stall_timeout_s` ends the loop too: an engine that makes no progress must not look
    alive. When a thread dies of an unexpected error it calls `on_failure`, once; the loop has ended then, and the
    process should.
    """

    def __init__(
        self,
        service: Service,
        runner: Runner,
        *,
        address: Address,
        clock: Clock,
        send: Callable[[Envelope], None],
        asynchronous: bool = False,
        on_failure: Callable[[BaseException], None] | None = None,
        gap_timeout_s: float = 5.0,
        stall_timeout_s: float = 120.0,
        strict: bool = False,
    ) -> None:
        self.address = address
        self.num_protocol_errors = 0
        """Messages that no table of the protocol lists."""
        self._strict = strict
        self.failure: BaseException | None = None
        self._service, self._runner = service, runner
        self._clock, self._send, self._on_failure = clock, send, on_failure
        self._depth = 2 if asynchronous else 1
        self._incoming, self._outgoing = Incoming(address, clock, gap_timeout_s), Outgoing(address)
        self._router: Address | None = None
        self._inbox: queue.SimpleQueue[Envelope | Drain | StepOutput | _StepFailed | _Signal] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Callable[[], StepOutput] | None] = queue.SimpleQueue()
        """For each launched step, the call that gives its output or raises."""
        self._num_in_flight = 0
        self._stall_timeout_s = stall_timeout_s
        self._step_started_at: float | None = None
        """When the step that runs now has started; None between steps. Only one thread writes it."""
        self._launch_started_at: float | None = None
        """When the launch that runs now has started; None between launches. Only one thread writes it."""
        self._idle = threading.Event()
        self._idle_lock = threading.Lock()
        """Held while `_idle` is made to agree with the inbox: it is set only if the inbox is empty."""
        steps: dict[str, Callable[[], None]] = {"step": self._step}
        if isinstance(runner, LaunchingRunner):
            steps = {"step": partial(self._launch, runner), "wait": self._wait}
        self._threads = [
            threading.Thread(target=self._run, args=(body,), name=f"{address.replica_id}-{name}", daemon=True)
            for name, body in {"loop": self._loop, **steps}.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def deliver(self, envelope: Envelope) -> None:
        """Takes a message for this engine, in any order and from any thread. Never blocks."""
        self._put(envelope)

    def wake(self) -> None:
        """Tells the loop that something which the service polls has changed. Any thread may call it. Never blocks."""
        self._inbox.put(_Signal.WAKE)

    def drain(self, deadline_s: float) -> None:
        """Drains as if the router had sent `Drain`. Returns at once; `wait_idle` tells when the engine is drained."""
        self._put(Drain(deadline_s=deadline_s))

    def wait_idle(self, timeout_s: float) -> bool:
        """Returns True as soon as all that was delivered is handled and the service holds nothing. Returns False after
        `timeout_s` or a failure.
        """
        return self._idle.wait(timeout_s) and self.failure is None

    def stop(self) -> None:
        """Ends all threads after the steps that run now, whose output is lost. Returns when they have ended."""
        self._inbox.put(_Signal.STOP)
        for thread in self._threads:
            thread.join()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        finally:
            failure = sys.exception()
            self._inbox.put(_Signal.STOP)
            self._steps.put(None)
            if failure is not None and self.failure is None:
                self.failure = failure
                log.error("the engine has failed", exc_info=failure)
                self._idle.set()
                if self._on_failure is not None:
                    self._on_failure(failure)

    def _step(self) -> None:
        while (batch := self._steps.get()) is not None:
            self._finish(partial(self._runner.execute, batch))

    def _launch(self, runner: LaunchingRunner) -> None:
        try:
            while (batch := self._steps.get()) is not None:
                self._launch_started_at = self._clock()
                try:
                    launched = runner.launch(batch)
                except (TwopassError, RuntimeError) as error:
                    self._launched.put(partial(_raise, error))
                else:
                    self._launched.put(launched.result)
                finally:
                    self._launch_started_at = None
        finally:
            self._launched.put(None)  # comes behind all steps, so that memory which the device still uses outlives them

    def _wait(self) -> None:
        while (result := self._launched.get()) is not None:
            self._finish(result)

    def _finish(self, result: Callable[[], StepOutput]) -> None:
        started = self._step_started_at = self._clock()
        try:
            output = result()
        except (TwopassError, RuntimeError) as error:
            self._inbox.put(_StepFailed(f"{type(error).__name__}: {error}"))
            return
        finally:
            self._step_started_at = None
        output.seconds = output.seconds or self._clock() - started
        self._inbox.put(output)

    def _loop(self) -> None:
        going = True
        while going:
            try:
                item = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                pass
            else:
                going = self._take(item)
                for _ in range(self._inbox.qsize()):
                    going = self._take(self._inbox.get()) and going
            self._report_lost()
            self._check_progress()
            self._service.tick()
            if going:
                self._fill()
            self._flush()
            with self._idle_lock:
                if self._service.idle and not self._num_in_flight and self._inbox.empty():
                    self._idle.set()

    def _put(self, item: Envelope | Drain) -> None:
        with self._idle_lock:
            self._idle.clear()
            self._inbox.put(item)

    def _take(self, item: Envelope | Drain | StepOutput | _StepFailed | _Signal) -> bool:
        """Handles one item from the inbox. Returns False if the loop is to stop."""
        match item:
            case Envelope():
                for envelope in self._incoming.accept(item):
                    sender = envelope.sender
                    if sender.replica_id == ROUTER_ID and (self._router is None or self._router.epoch < sender.epoch):
                        self._router = sender
                    self._handle(envelope)
            case Drain():
                self._handle(Envelope(self.address, self.address, 0, item))
            case StepOutput():
                self._num_in_flight -= 1
                self._service.commit(item)
            case _StepFailed():
                self._num_in_flight -= 1
                self._service.step_failed(item.error)
            case _Signal():
                return item is _Signal.WAKE
        return True

    def _handle(self, envelope: Envelope) -> None:
        """Handles a message. One that no table lists is ignored and counted, so that it harms no other request; a
        strict loop ends.
        """
        try:
            self._service.handle(envelope)
        except ProtocolError as error:
            if self._strict:
                raise
            self.num_protocol_errors += 1
            fields = {"kind": type(envelope.message).__name__, "peer": label(envelope.sender), "error": str(error)}
            log.error("message ignored", extra=fields)

    def _fill(self) -> None:
        """Gives the step thread as many batches as the depth allows."""
        while self._num_in_flight < self._depth and (batch := self._service.schedule()) is not None:
            self._num_in_flight += 1
            self._steps.put(batch)

    def _check_progress(self) -> None:
        for started in (self._step_started_at, self._launch_started_at):
            if started is not None and (seconds := self._clock() - started) > self._stall_timeout_s:
                raise EngineStalled(
                    f"a step has been running for {seconds:.1f} s, stall_timeout_s is {self._stall_timeout_s:g}"
                )

    def _report_lost(self) -> None:
        for lost in self._incoming.lost():
            if lost.replica_id == ROUTER_ID:
                self._service.router_gone()
            elif self._router is not None:
                self._service.outbox.append((self._router, PeerGap(peer=lost)))

    def _flush(self) -> None:
        messages = self._service.outbox[:]
        self._service.outbox.clear()
        for receiver, message in messages:
            self._send(self._outgoing.envelope(receiver, message))


def _raise(error: Exception) -> NoReturn:
    raise error
