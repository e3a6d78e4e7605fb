"""What every front door shares: it owns the router's core and carries each request through it.

 1. `generate` reads, validates and tokenises a message off the event loop.
 2. The core is handed one request per answer (`submit`), or refuses with a RequestError; it accepts all answers, or
    none.
 3. After every input, a tick included, `pump` sends the core's outbox to the engines and its events to the answers they
    belong to.
 4. `generate` takes the tokens as fast as its client does, several steps at once if the client is slow, and makes text
    of them.
 5. Exactly one `Ended` closes each answer; the call ends with the last, or with the first error. A caller that stops
    iterating cancels what is open.
 6. What the client was told is what is counted and traced, once it was told: the core's own end may be another (a stop
    string in the last tokens, a client too slow for them).

Everything but tokenisation runs on one event loop, so the core needs no lock.
"""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from protocol.clock import Clock
from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestCancelled, RequestError
from protocol.messages import Address, Envelope, FinishReason, Message, TokenLogprobs
from router.admission import ClientRequest
from router.buffer import Buffer
from router.config import RouterConfig
from router.detokenizer import Detokenizer
from router.metrics_totals import DoorTotals, end_of
from router.parse import Parsed, num_asked, parse_generate, parse_tokenize
from router.policy import ReplicaView
from router.request import Delivered, Ended, Path
from router.tokenizer import Tokenizer
from router.tracing import CallTrace, Tracing, Untraced
from twopass.proto import twopass_pb2 as pb

TOKENIZER_RETRY_S = 1.0
DEADLINE_ROUNDING, DEADLINE_TRAVEL_S = 0.01, 0.05
"""A client's deadline passes there first: gRPC rounds it up by such a share for its way here, and the way takes time.
"""

_FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}

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
    """What is served. `vocab_size`: rows of the embedding; prompts may name ids below it."""

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
        self._started_at = clock()
        self._config, self._send, self._clock = config, send, clock
        self._tracing = tracing or Untraced()
        self.totals = DoorTotals()
        self._calls: dict[str, _Call] = {}
        self._answers: dict[str, _Answer] = {}
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._num_in_threads = 0

    @property
    def num_open(self) -> int:
        """Answers accepted and not yet ended."""
        return len(self._answers)

    async def run(self) -> None:
        """Ticks until cancelled. What it raises is a bug in the core: nothing can be served after it."""
        while True:
            self.core.tick()
            self.pump()
            await asyncio.sleep(self._config.tick_interval_s)

    def deliver(self, envelope: Envelope) -> None:
        """A message from an engine, in the order it was numbered."""
        self.core.handle(envelope)
        self.pump()

    def pump(self) -> None:
        """Carries off what the core has put out; for whoever gives the core an input of his own, directly after it."""
        core = self.core
        while core.outbox or core.events:  # cancelling an answer that has grown too long fills them again
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
            if answer is not None and answer.push(
                token_ids, delivered.logprobs.get(request_id, ())
            ):  # None: its client went away
                self.core.cancel(request_id)

    def drain(self, deadline_s: float) -> None:
        """Accepts nothing new; what is open at the deadline (seconds from now) ends with an error."""
        self.core.drain(deadline_s)
        self.pump()

    def close(self) -> None:
        """Ends the threads; for when nothing is open any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, read: Callable[[], pb.TokenizeRequest]) -> pb.TokenizeResponse:
        """`read` is called in a thread and may raise RequestError, as this does."""
        token_ids = await self._in_thread(lambda: parse_tokenize(read(), self.tokenizer))
        return pb.TokenizeResponse(token_ids=token_ids.tolist(), max_model_len=self.core.max_model_len)

    def info(self) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=_version(),
            model=self.model.name,
            max_model_len=self.core.max_model_len,
            ready=self.core.ready,
            uptime_s=self._clock() - self._started_at,
            max_message_bytes=self._config.max_message_bytes,
            max_queue=self._config.max_queue,
        )

    def loads(self) -> pb.GetLoadsResponse:
        """Of every engine, as of its last status."""
        replicas = [_replica_load(replica, self._clock()) for replica in self.core.replicas()]
        return pb.GetLoadsResponse(num_open=self.num_open, num_queued=self.core.num_queued, replicas=replicas)

    def abort(self, request_id: str) -> bool:
        """Ends an open call by its id, with an error for its client. False: there is none."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        for answer in call.answers:
            self.core.cancel(answer.request_id)
        self.pump()
        return True

    async def generate(
        self, read: Callable[[], pb.GenerateRequest], *, deadline_s: float | None, traceparent: str = ""
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answers in pieces, the last of each with `finish_reason`, the last of all with usage and timing.

        `read` is called in a thread and may raise RequestError, as this does. Close the generator
        (`contextlib.aclosing`): that is what cancels answers nobody waits for. `traceparent`: the caller's W3C trace
        context, from its metadata.
        """
        arrived_at, trace, num_answers = self._clock(), self._tracing.begin(traceparent), 1

        def work() -> Parsed:
            nonlocal num_answers
            message = read()
            num_answers = num_asked(message)
            return parse_generate(
                message,
                self.tokenizer,
                vocab_size=self.model.vocab_size,
                max_model_len=self.core.max_model_len,
                deadline_s=None if deadline_s is None else deadline_s - (self._clock() - arrived_at),
                traceparent=trace.traceparent,
            )

        try:
            parsed = await self._in_thread(work)
            call = self._open(parsed, arrived_at, trace, deadline_s)
        except (RequestError, asyncio.CancelledError) as raised:
            refusal = raised if isinstance(raised, RequestError) else self._gone(arrived_at, deadline_s)
            trace.end(refusal.code)
            self.totals.refused(refusal, num_answers)
            raise
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
                        self._told(answer, answer.finish)
                    if piece.HasField("usage"):
                        return
        finally:
            self._close(call, error)

    def _piece(self, call: "_Call", answer: "_Answer") -> tuple[pb.GenerateResponse, RequestError | None]:
        """What waits for the client, and the error that it ends with, if it does."""
        token_ids, logprobs = answer.take()
        if answer.first_at is None:
            answer.first_at = self._clock()
            if token_ids:
                self.totals.first_token.observe(answer.first_at - call.arrived_at)
        text, num_kept = answer.detokenizer.push(token_ids)
        answer.num_tokens += num_kept
        piece = pb.GenerateResponse(text=text, token_ids=token_ids[:num_kept], index=answer.index)
        for values in logprobs[:num_kept]:
            piece.logprobs.add(logprob=values.chosen, top_token_ids=values.top_token_ids, top_logprobs=values.top)
        stopped = answer.detokenizer.stopped
        if stopped and answer.ended is None:  # tokens past the stop string are dropped
            self.core.stop(answer.request_id)
            self.pump()
        ended = answer.ended
        if ended is None:
            return piece, None
        if ended.error is not None and not stopped:
            return piece, ended.error
        piece.text += answer.detokenizer.finish()
        self._finish(call, answer, ended, piece)
        return piece, None

    def _finish(self, call: "_Call", answer: "_Answer", ended: Ended, piece: pb.GenerateResponse) -> None:
        """Ends an answer in its last piece; the last one brings usage and timing of the call."""
        reason = "stop" if answer.detokenizer.stopped else ended.finish_reason
        assert reason is not None
        piece.finish_reason = _FINISH_REASONS[reason]
        now = self._clock()
        total_s = now - call.arrived_at
        stages = {"tokenize": call.submitted_at - call.arrived_at, **ended.stages}
        stages["deliver"] = max(0.0, total_s - sum(stages.values()))
        answer.finish = _Finish(reason, ended.path, total_s, stages)
        answers = call.answers
        if not all(other.finish for other in answers):
            return
        ends = [other.ended for other in answers if other.ended is not None]
        usage = pb.Usage(
            prompt_tokens=call.num_prompt_tokens,
            cached_tokens=ends[0].usage.cached_tokens,
            completion_tokens=sum(other.num_tokens for other in answers),
        )
        first_at = min(now if other.first_at is None else other.first_at for other in answers)
        attempts = max(end.attempts for end in ends)
        piece.usage.CopyFrom(usage)
        piece.timing.CopyFrom(
            pb.Timing(ttft_s=first_at - call.arrived_at, total_s=total_s, stages=stages, attempts=attempts)
        )

    def _told(self, answer: "_Answer", finish: "_Finish") -> None:
        """The connection has taken an answer's last piece."""
        answer.told = True
        self.totals.finished(*finish)

    def _gone(self, arrived_at: float, deadline_s: float | None) -> RequestError:
        """What a client has that does not wait for the end: its deadline has passed, or it cancels."""
        if (
            deadline_s is not None
            and self._clock() - arrived_at >= deadline_s * (1 - DEADLINE_ROUNDING) - DEADLINE_TRAVEL_S
        ):
            return DeadlineExceeded(f"deadline: {deadline_s:g} s have passed")
        return RequestCancelled("the client is gone")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._num_in_threads >= self._config.max_queue:
            raise Overloaded(f"{self._num_in_threads} requests wait for tokenisation", retry_after_s=TOKENIZER_RETRY_S)
        self._num_in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_in_threads -= 1

    def _open(self, parsed: Parsed, arrived_at: float, trace: CallTrace, deadline_s: float | None) -> "_Call":
        if parsed.request_id in self._calls:
            raise InvalidRequest("request_id", parsed.request_id, "a request of that name is still open")
        submitted_at = self._clock()
        self.core.submit(*parsed.requests)
        call = self._calls[parsed.request_id] = _Call(
            parsed, self.tokenizer, self._config.max_buffered_tokens, arrived_at, submitted_at, trace, deadline_s
        )
        self._answers.update({answer.request_id: answer for answer in call.answers})
        trace.asked(self.model.name, parsed.request_id, parsed.requests)
        self.pump()
        return call

    def _close(self, call: "_Call", error: RequestError | None) -> None:
        """`error`: what the client was told; None: all answers, or nothing because it is gone."""
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


class _Call:
    """One call and its answers, all to the same prompt."""

    __slots__ = (
        "_wake",
        "answers",
        "arrived_at",
        "deadline_s",
        "num_prompt_tokens",
        "request_id",
        "submitted_at",
        "trace",
    )

    def __init__(
        self,
        parsed: Parsed,
        tokenizer: Tokenizer,
        max_buffered_tokens: int,
        arrived_at: float,
        submitted_at: float,
        trace: CallTrace,
        deadline_s: float | None,
    ) -> None:
        self.request_id, self.deadline_s = parsed.request_id, deadline_s
        self.arrived_at, self.submitted_at, self.trace = arrived_at, submitted_at, trace
        self.num_prompt_tokens = len(parsed.requests[0].prompt_token_ids)
        self._wake = asyncio.Event()
        self.answers = [
            _Answer(index, parsed, tokenizer, Buffer(max_buffered_tokens), self._wake)
            for index in range(len(parsed.requests))
        ]

    async def news(self) -> list["_Answer"]:
        """Answers for which tokens wait, or the end; at least one. To be called while one is not done."""
        while True:
            self._wake.clear()
            if waiting := [answer for answer in self.answers if answer.has_news]:
                return waiting
            await self._wake.wait()


class _Finish(NamedTuple):
    """An answer that is complete: what its last piece says, and what is counted once the client has that."""

    reason: FinishReason
    path: Path
    total_s: float
    stages: dict[str, float]


class _Answer:
    """Tokens on their way from the core to one client."""

    __slots__ = (
        "_buffer",
        "_wake",
        "detokenizer",
        "ended",
        "finish",
        "first_at",
        "index",
        "num_tokens",
        "request_id",
        "told",
    )

    def __init__(self, index: int, parsed: Parsed, tokenizer: Tokenizer, buffer: Buffer, wake: asyncio.Event) -> None:
        request = parsed.requests[index]
        self.index, self.request_id = index, request.request_id
        min_tokens = request.sampling.min_tokens
        self.detokenizer = Detokenizer(tokenizer, parsed.stop, include_stop=parsed.include_stop, min_tokens=min_tokens)
        self.ended: Ended | None = None
        self.first_at: float | None = None
        """When its first tokens were taken."""
        self.num_tokens = 0
        """Of the answer, as the client has them."""
        self.finish: _Finish | None = None
        self.told = False
        """Its last piece was taken by the connection."""
        self._buffer, self._wake = buffer, wake

    @property
    def has_news(self) -> bool:
        return self.finish is None and (len(self._buffer) > 0 or self.ended is not None)

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        """True: too many wait for the client now."""
        self._wake.set()
        return self._buffer.push(token_ids, logprobs)

    def end(self, ended: Ended) -> None:
        self.ended = self._buffer.end(ended)
        self._wake.set()

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        return self._buffer.take()


def _replica_load(replica: ReplicaView, now: float) -> pb.ReplicaLoad:
    hello, status = replica.hello, replica.status
    load = pb.ReplicaLoad(
        replica_id=replica.address.replica_id,
        epoch=replica.address.epoch,
        role=hello.role,
        state=replica.state,
        in_flight=replica.in_flight,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_num_seqs=hello.max_num_seqs,
        age_s=now - replica.heard_at,
    )
    if status is not None:
        load.num_waiting, load.num_running = status.num_waiting, status.num_running
        load.num_free_blocks, load.num_leases, load.num_pulls = (
            status.num_free_blocks,
            status.num_leases,
            status.num_pulls,
        )
        load.transport = status.transport
        load.counters.update(status.counters)
        load.num_scheduled_tokens.extend(pb.ScheduledTokens(num_tokens=step) for step in status.num_scheduled_tokens)
    return load


def _version() -> str:
    try:
        return importlib.metadata.version("twopass")
    except importlib.metadata.PackageNotFoundError:
        return ""
