"""What every front door shares: it carries each call to the core and back. No transport is known here.

 1. `generate` reads, validates and tokenises a request in a thread.
 2. `_open` submits one request per answer. The core accepts all of them, or refuses all with a RequestError.
 3. What the core has for this door comes in batches (`router/door_messages.py`). `DoorLink` hands each answer its own.
 4. `generate` takes tokens as fast as the client does, those of several steps at once if the client is slow, and turns
    them into text.
 5. Exactly one `Ended` closes each answer. The call ends with its last answer, or with the first error. A caller that
    stops iterating cancels the answers that are still open.
 6. Counters and spans record what the client was told, once it was told. The core may have ended the answer otherwise,
    for example when the last tokens hold a stop string or the client reads too slowly.

Everything but tokenisation runs on one event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from protocol.arrays import Int32
from protocol.clock import Clock
from protocol.errors import InvalidRequest, RequestError
from protocol.messages import FinishReason
from router.admission import Account
from router.call import Answer, Call, Piece, gone
from router.call_request import CallRequest, Prompt
from router.config import RouterConfig
from router.door_link import CoreLink, DoorLink
from router.door_messages import Facts, Loads
from router.metrics_totals import DoorTotals, end_of
from router.parse import Parsed, num_asked, parse_generate, parse_tokenize
from router.tokenizer import Tokenizer
from router.tokenizer_threads import TokenizerThreads
from router.tracing import CallTrace, Tracing, Untraced

T = TypeVar("T")


class Model(NamedTuple):
    """The model that is served. `vocab_size`: rows of the embedding. Token ids of prompts must be below it."""

    name: str
    vocab_size: int


class FrontDoor:
    """All methods belong to the event loop that `run` runs on."""

    def __init__(
        self,
        link: CoreLink,
        tokenizer: Tokenizer,
        config: RouterConfig,
        model: Model,
        *,
        clock: Clock,
        totals: DoorTotals,
        tracing: Tracing | None = None,
    ) -> None:
        self.tokenizer, self.model = tokenizer, model
        self._config, self._clock = config, clock
        self._started_at = clock()
        self._tracing = tracing or Untraced()
        self.totals = totals
        self._calls: dict[str, Call] = {}
        self._threads = TokenizerThreads(config.tokenizer_threads, config.max_queue)
        self._link = DoorLink(link)

    @property
    def facts(self) -> Facts:
        """What the core has told of itself."""
        return self._link.facts

    @property
    def num_open(self) -> int:
        """Answers whose clients have not been told their ends."""
        return sum(len(call.answers) for call in self._calls.values())

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at

    async def loads(self) -> Loads:
        """Raises RequestFailed while no core is up, like `abort`."""
        told: asyncio.Future[Loads | RequestError] = asyncio.get_running_loop().create_future()
        self._link.loads(partial(_tell, told))
        if isinstance(loads := await told, RequestError):
            raise loads
        return loads

    def report(self) -> None:
        """Tells the core what was counted since the last report. A door of the core's process has nothing to tell."""
        counts = self.totals.counts()
        if counts is not None and self._link.counted(counts):
            self.totals = DoorTotals()

    async def close(self) -> None:
        """Ends the tokenisation threads and exports the last spans. Nothing may be open any more."""
        self._threads.close()
        await asyncio.to_thread(self._tracing.close)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` beside the event loop. Raises Overloaded if `max_queue` such works are already under way."""
        return await self._threads.run(work)

    async def tokenize(self, read: Callable[[], Prompt]) -> Int32:
        """Returns token ids, int32 [num_tokens]. `read` is called in a thread. Both may raise RequestError."""
        return await self.in_thread(lambda: parse_tokenize(read(), self.tokenizer))

    async def abort(self, request_id: str) -> bool:
        """Ends an open call of any door by its id, with an error for its client. Returns False if none is open."""
        call = self._calls.get(request_id)
        if call is not None:
            self._link.cancel(call.open)
            return True
        told: asyncio.Future[bool | RequestError] = asyncio.get_running_loop().create_future()
        self._link.abort(request_id, partial(_tell, told))
        if isinstance(found := await told, RequestError):
            raise found
        return found

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
        wake = asyncio.Event()
        call = await self.open(read, wake.set, deadline_s=deadline_s, traceparent=traceparent, account=account)
        error: RequestError | None = None
        try:
            while True:
                wake.clear()
                for answer in call.waiting():
                    piece, failure = self.next_piece(call, answer)
                    if piece.token_ids or piece.finish_reason is not None:
                        yield piece
                    if failure is not None:
                        error = failure
                        raise error
                    if answer.finish is not None:
                        self.told(answer)  # the connection has taken its last piece
                    if piece.usage is not None:
                        return
                await wake.wait()
        finally:
            self.close_call(call, error)

    async def open(
        self,
        read: Callable[[], CallRequest],
        wake: Callable[[], None],
        *,
        deadline_s: float | None,
        traceparent: str = "",
        account: Account | None = None,
    ) -> Call:
        """Begins a call, with the arguments of `generate`. `wake` is called whenever an answer has news. Whoever opens
        a call takes its answers' pieces (`next_piece`), says which last ones were taken (`told`), and closes the call.
        A call that is refused is counted as that, also one whose client leaves before it is open.
        """
        arrived_at, trace, num_answers = self._clock(), self._tracing.begin(traceparent), 1

        def parse() -> Parsed:
            nonlocal num_answers
            asked = read()
            num_answers = num_asked(asked)
            return parse_generate(
                asked,
                self.tokenizer,
                vocab_size=self.model.vocab_size,
                max_model_len=self.facts.max_model_len,
                deadline_s=None if deadline_s is None else deadline_s - (self._clock() - arrived_at),
                traceparent=trace.traceparent,
                account=account,
            )

        try:
            parsed = await self.in_thread(parse)
        except (RequestError, asyncio.CancelledError) as raised:
            refusal = raised if isinstance(raised, RequestError) else gone(self._clock() - arrived_at, deadline_s)
            self._refused(trace, refusal, num_answers)
            raise
        return await self._open(parsed, wake, arrived_at, trace, deadline_s)

    def _refused(self, trace: CallTrace, refusal: RequestError, num_answers: int) -> None:
        trace.end(refusal.code)
        self.totals.refused(refusal, num_answers)

    def next_piece(
        self, call: Call, answer: Answer, max_tokens: int | None = None
    ) -> tuple[Piece, RequestError | None]:
        """Returns what waits for the client, and the error that the answer ends with, if it ends with one. Tokens
        beyond `max_tokens` wait on, and so does a good end behind them.
        """
        token_ids, logprobs = answer.take(max_tokens)
        if answer.first_at is None:
            answer.first_at = self._clock()
            if token_ids:
                self.totals.first_token.observe(answer.first_at - call.arrived_at)
        text, num_kept = answer.detokenizer.push(token_ids)
        answer.num_tokens += num_kept
        piece = Piece(answer.index, text, token_ids[:num_kept], logprobs[:num_kept])
        stopped = answer.detokenizer.stopped
        if stopped and answer.ended is None and not answer.stopping:  # tokens past the stop string are dropped
            answer.stopping = True
            self._link.stop(call.first + answer.index)
        ended = answer.ended
        failure = None
        if ended is not None and ended.error is not None and not stopped:
            failure = ended.error
        elif ended is not None and (stopped or not answer.num_waiting):
            piece.text += answer.detokenizer.finish()
            call.finish(answer, ended, piece, self._clock())
        if not call.begun and (piece.token_ids or piece.finish_reason is not None):
            call.begun = True
            piece.prompt_tokens, piece.request_id = call.num_prompt_tokens, call.request_id
        return piece, failure

    def told(self, answer: Answer) -> None:
        """Counts an answer whose last piece the connection has taken."""
        assert answer.finish is not None
        answer.told = True
        self.totals.finished(*answer.finish)

    async def _open(
        self,
        parsed: Parsed,
        wake: Callable[[], None],
        arrived_at: float,
        trace: CallTrace,
        deadline_s: float | None,
    ) -> Call:
        """Submits a call, and waits for the core's word. Counts it as refused if it is."""
        name, num_answers = parsed.request_id, len(parsed.requests)
        if name in self._calls:
            taken = InvalidRequest("request_id", name, "a request of that name is still open")
            self._refused(trace, taken, num_answers)
            raise taken
        call = self._calls[name] = Call(
            parsed, self.tokenizer, self._config.max_buffered_tokens, arrived_at, self._clock(), trace, deadline_s, wake
        )
        told: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()

        def opened(refusal: RequestError | None) -> None:
            if refusal is None:
                trace.asked(self.model.name, name, parsed.requests)
            else:
                del self._calls[name]
                self._refused(trace, refusal, num_answers)
            _tell(told, refusal)

        call.first = self._link.submit(name, parsed.requests, call.answers, opened)
        try:
            refusal = await told
        except asyncio.CancelledError:  # if the core accepts it, it is cancelled at once
            self.close_call(call, gone(self._clock() - arrived_at, deadline_s))
            raise
        if refusal is not None:
            raise refusal
        return call

    def close_call(self, call: Call, error: RequestError | None) -> None:
        """Ends a call. `error`: what the client was told; None if it got all its answers, or left before their end."""
        if error is None and not all(answer.told for answer in call.answers):
            error = gone(self._clock() - call.arrived_at, call.deadline_s)
        self._link.cancel(call.open)
        call.when_ended(partial(self._closed, call, error))

    def _closed(self, call: Call, error: RequestError | None) -> None:
        """Counts and records a call all of whose answers have ended."""
        for answer in call.answers:
            assert answer.ended is not None
            told: FinishReason | RequestError
            if answer.told and answer.finish is not None:
                told = answer.finish.reason
            else:
                assert error is not None
                told = error
                self.totals.failed(error)
            call.trace.answered(answer.index, answer.ended, end_of(told), call.submitted_at - call.arrived_at)
        call.trace.end("OK" if error is None else error.code)
        del self._calls[call.request_id]


def _tell(waiting: asyncio.Future[T], news: T) -> None:
    """Whoever waited may be gone."""
    if not waiting.done():
        waiting.set_result(news)
