"""What every front door shares: it owns the router's core and carries each call through it. No transport is known here.

 1. `generate` reads, validates and tokenises a request in a thread.
 2. `submit` hands the core one request per answer. The core accepts all of them, or refuses all with a RequestError.
 3. After every input, a tick included, `pump` sends the core's outbox to the engines and its events to their answers.
 4. `generate` takes tokens as fast as the client does, those of several steps at once if the client is slow, and turns
    them into text.
 5. Exactly one `Ended` closes each answer. The call ends with its last answer, or with the first error. A caller that
    stops iterating cancels the answers that are still open.
 6. Counters and spans record what the client was told, once it was told. The core may have ended the answer otherwise,
    for example when the last tokens hold a stop string or the client reads too slowly.

Everything but tokenisation runs on one event loop, so the core needs no lock.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from protocol.arrays import Int32
from protocol.clock import Clock
from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestCancelled, RequestError
from protocol.messages import Address, Envelope, FinishReason, Message
from router.admission import Account, ClientRequest
from router.call import Answer, Call, Piece
from router.call_request import CallRequest, Prompt
from router.config import RouterConfig
from router.metrics_totals import DoorTotals, end_of
from router.parse import Parsed, num_asked, parse_generate, parse_tokenize
from router.policy import ReplicaView
from router.request import Delivered, Ended
from router.tokenizer import Tokenizer
from router.tracing import CallTrace, Tracing, Untraced

TOKENIZER_RETRY_S = 1.0
"""What an Overloaded tells its client to wait when too many requests are being tokenised."""
DEADLINE_ROUNDING, DEADLINE_TRAVEL_S = 0.01, 0.05
"""A deadline passes at the client first: gRPC adds up to this share before it sends it, and sending it takes time."""

T = TypeVar("T")


class Core(Protocol):
    """The router's state machine as the front doors see it."""

    outbox: list[tuple[Address, Message]]
    events: list[Delivered | Ended]

    @property
    def max_model_len(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_queued(self) -> int: ...
    def replicas(self) -> Iterator[ReplicaView]: ...
    def submit(self, *requests: ClientRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stop(self, request_id: str) -> None: ...
    def handle(self, envelope: Envelope) -> None: ...
    def tick(self) -> None: ...
    def drain(self, deadline_s: float) -> None: ...


class Model(NamedTuple):
    """The model that is served. `vocab_size`: rows of the embedding. Token ids of prompts must be below it."""

    name: str
    vocab_size: int


class FrontDoor:
    """All methods belong to the event loop that `run` runs on."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        config: RouterConfig,
        model: Model,
        *,
        send: Callable[[Address, Message], None],
        clock: Clock,
        tracing: Tracing | None = None,
    ) -> None:
        self.core, self.tokenizer, self.model = core, tokenizer, model
        self._config, self._send, self._clock = config, send, clock
        self._started_at = clock()
        self._tracing = tracing or Untraced()
        self.totals = DoorTotals()
        self._calls: dict[str, Call] = {}
        self._answers: dict[str, Answer] = {}
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._num_in_threads = 0

    @property
    def num_open(self) -> int:
        """Answers accepted and not yet ended."""
        return len(self._answers)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at

    def loads(self) -> list[tuple[ReplicaView, float]]:
        """Every engine as of its last status, with the seconds since then."""
        now = self._clock()
        return [(replica, now - replica.heard_at) for replica in self.core.replicas()]

    async def run(self) -> None:
        """Ticks until it is cancelled. Anything it raises is a bug in the core, after which nothing can be served."""
        while True:
            self.core.tick()
            self.pump()
            await asyncio.sleep(self._config.tick_interval_s)

    def deliver(self, envelope: Envelope) -> None:
        """Takes one message of an engine. Messages come in the order of their numbers."""
        self.core.handle(envelope)
        self.pump()

    def pump(self) -> None:
        """Delivers what the core has put out. Whoever gives the core an input calls this directly afterwards."""
        core = self.core
        while core.outbox or core.events:  # cancelling an overflown answer fills them again
            outbox, events = core.outbox[:], core.events[:]
            core.outbox.clear()
            core.events.clear()
            for address, message in outbox:
                self._send(address, message)
            for event in events:
                if isinstance(event, Delivered):
                    self._deliver(event)
                elif (answer := self._answers.get(event.request_id)) is not None:
                    answer.end(event)

    def _deliver(self, delivered: Delivered) -> None:
        for request_id, token_ids in delivered.rows():
            answer = self._answers.get(request_id)
            if answer is not None and answer.push(token_ids, delivered.logprobs.get(request_id, ())):
                self.core.cancel(request_id)

    def drain(self, deadline_s: float) -> None:
        """Accepts nothing new. What is still open in `deadline_s` seconds ends with an error."""
        self.core.drain(deadline_s)
        self.pump()

    def close(self) -> None:
        """Ends the tokenisation threads. Nothing may be open any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, read: Callable[[], Prompt]) -> Int32:
        """Returns token ids, int32 [num_tokens]. `read` is called in a thread. Both may raise RequestError."""
        return await self.in_thread(lambda: parse_tokenize(read(), self.tokenizer))

    def abort(self, request_id: str) -> bool:
        """Ends an open call by its id, with an error for its client. Returns False if no such call is open."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        for answer in call.answers:
            self.core.cancel(answer.request_id)
        self.pump()
        return True

    async def generate(
        self,
        read: Callable[[], CallRequest],
        *,
        deadline_s: float | None,
        traceparent: str = "",
        account: Account | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Yields the call's answers in pieces. Raises RequestError when the call is refused or fails.

        `read` is called in a thread and may raise RequestError. `deadline_s`: seconds left on arrival. `traceparent`:
        the caller's W3C trace context, or "". `account`: who calls, where that is asked. Close the generator
        (`contextlib.aclosing`): only that cancels answers that nobody waits for any more.
        """
        call = await self._accept(read, deadline_s, traceparent, account)
        first = True
        error: RequestError | None = None
        try:
            while True:
                for answer in await call.news():
                    piece, failure = self._piece(call, answer)
                    if first:
                        piece.prompt_tokens, piece.request_id = call.num_prompt_tokens, call.request_id
                    if failure is None or piece.token_ids:
                        first = False
                        yield piece
                    if failure is not None:
                        error = failure
                        raise error
                    if answer.finish is not None:
                        answer.told = True  # the connection has taken its last piece
                        self.totals.finished(*answer.finish)
                    if piece.usage is not None:
                        return
        finally:
            self._close(call, error)

    async def _accept(
        self, read: Callable[[], CallRequest], deadline_s: float | None, traceparent: str, account: Account | None
    ) -> Call:
        """Parses a request and opens its call. Counts it as refused if it is, or if its client leaves before that."""
        arrived_at, trace, num_answers = self._clock(), self._tracing.begin(traceparent), 1

        def parse() -> Parsed:
            nonlocal num_answers
            asked = read()
            num_answers = num_asked(asked)
            return parse_generate(
                asked,
                self.tokenizer,
                vocab_size=self.model.vocab_size,
                max_model_len=self.core.max_model_len,
                deadline_s=None if deadline_s is None else deadline_s - (self._clock() - arrived_at),
                traceparent=trace.traceparent,
                account=account,
            )

        try:
            parsed = await self.in_thread(parse)
            return self._open(parsed, arrived_at, trace, deadline_s)
        except (RequestError, asyncio.CancelledError) as raised:
            refusal = raised if isinstance(raised, RequestError) else self._gone(arrived_at, deadline_s)
            trace.end(refusal.code)
            self.totals.refused(refusal, num_answers)
            raise

    def _piece(self, call: Call, answer: Answer) -> tuple[Piece, RequestError | None]:
        """Returns what waits for the client, and the error that the answer ends with, if it ends with one."""
        token_ids, logprobs = answer.take()
        if answer.first_at is None:
            answer.first_at = self._clock()
            if token_ids:
                self.totals.first_token.observe(answer.first_at - call.arrived_at)
        text, num_kept = answer.detokenizer.push(token_ids)
        answer.num_tokens += num_kept
        piece = Piece(answer.index, text, token_ids[:num_kept], logprobs[:num_kept])
        stopped = answer.detokenizer.stopped
        if stopped and answer.ended is None:  # the core's answer ends too; tokens past the stop string are dropped
            self.core.stop(answer.request_id)
            self.pump()
        ended = answer.ended
        if ended is None:
            return piece, None
        if ended.error is not None and not stopped:
            return piece, ended.error
        piece.text += answer.detokenizer.finish()
        call.finish(answer, ended, piece, self._clock())
        return piece, None

    def _gone(self, arrived_at: float, deadline_s: float | None) -> RequestError:
        """How a call ends whose client did not wait for the end: its deadline has passed, or the client cancelled."""
        waited_s = self._clock() - arrived_at
        if deadline_s is not None and waited_s >= deadline_s * (1 - DEADLINE_ROUNDING) - DEADLINE_TRAVEL_S:
            return DeadlineExceeded(f"deadline: {deadline_s:g} s have passed")
        return RequestCancelled("the client is gone")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` beside the event loop. Raises Overloaded if `max_queue` such works are already under way."""
        if self._num_in_threads >= self._config.max_queue:
            raise Overloaded(f"{self._num_in_threads} requests wait for tokenisation", retry_after_s=TOKENIZER_RETRY_S)
        self._num_in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_in_threads -= 1

    def _open(self, parsed: Parsed, arrived_at: float, trace: CallTrace, deadline_s: float | None) -> Call:
        if parsed.request_id in self._calls:
            raise InvalidRequest("request_id", parsed.request_id, "a request of that name is still open")
        submitted_at = self._clock()
        self.core.submit(*parsed.requests)
        call = self._calls[parsed.request_id] = Call(
            parsed, self.tokenizer, self._config.max_buffered_tokens, arrived_at, submitted_at, trace, deadline_s
        )
        self._answers.update({answer.request_id: answer for answer in call.answers})
        trace.asked(self.model.name, parsed.request_id, parsed.requests)
        self.pump()
        return call

    def _close(self, call: Call, error: RequestError | None) -> None:
        """Ends a call. `error`: what the client was told; None if it got all its answers, or left before their end."""
        if error is None and not all(answer.told for answer in call.answers):
            error = self._gone(call.arrived_at, call.deadline_s)
        for answer in call.answers:
            if answer.ended is None:
                self.core.cancel(answer.request_id)
        self.pump()
        for answer in call.answers:
            told: FinishReason | RequestError
            if answer.told and answer.finish is not None:
                told = answer.finish.reason
            else:
                assert error is not None
                told = error
                self.totals.failed(error)
            if answer.ended is not None:
                call.trace.answered(answer.index, answer.ended, end_of(told), call.submitted_at - call.arrived_at)
            del self._answers[answer.request_id]
        call.trace.end("OK" if error is None else error.code)
        del self._calls[call.request_id]
