"""What every front door shares: it owns the router's core and carries each request through it.

 1. `generate` reads, validates and tokenises a message off the event loop.
 2. The core is handed the request (`submit`), or refuses it with a RequestError.
 3. After every input, a tick included, `pump` sends the core's outbox to the engines and its events to the answers they belong to.
 4. `generate` takes an answer's tokens as fast as its client does, several steps at once if the client is slow, and makes text of them.
 5. Exactly one `Ended` closes the answer. A caller that stops iterating cancels the request.

Everything but tokenisation runs on one event loop, so the core needs no lock.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from protocol.clock import Clock
from protocol.errors import InvalidRequest, Overloaded, RequestCancelled, RequestError
from protocol.messages import Address, Envelope, Int32, Message
from router.admission import ClientRequest
from router.config import RouterConfig
from router.detokenizer import Detokenizer
from router.metrics_totals import DoorTotals
from router.parse import Parsed, parse_generate, parse_tokenize
from router.request import Ended, Tokens
from router.tokenizer import Tokenizer
from twopass.proto import twopass_pb2 as pb

TOKENIZER_RETRY_S = 1.0

_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}

T = TypeVar("T")


class Core(Protocol):
    """The router's state machine as the front doors see it."""

    outbox: list[tuple[Address, Message]]
    events: list[Tokens | Ended]

    @property
    def max_model_len(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    def submit(self, request: ClientRequest) -> None: ...
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
    ) -> None:
        self.core, self.tokenizer, self.model = core, tokenizer, model
        self._config, self._send, self._clock = config, send, clock
        self.totals = DoorTotals()
        self._answers: dict[str, _Answer] = {}
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._num_in_threads = 0

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
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
                answer = self._answers.get(event.request_id)
                if answer is None:
                    continue  # its client went away
                if isinstance(event, Ended):
                    answer.end(event)
                elif answer.push(event.token_ids) > self._config.max_buffered_tokens and not answer.overflown:
                    answer.overflown = True
                    core.cancel(event.request_id)

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

    async def generate(
        self, read: Callable[[], pb.GenerateRequest], *, deadline_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One answer in pieces, the last with `finish_reason`. `read` is called in a thread and may raise RequestError, as this does.

        Close the generator (`contextlib.aclosing`): that is what cancels an answer nobody waits for.
        """
        arrived_at = self._clock()

        def work() -> Parsed:
            return parse_generate(
                read(),
                self.tokenizer,
                vocab_size=self.model.vocab_size,
                max_model_len=self.core.max_model_len,
                deadline_s=None if deadline_s is None else deadline_s - (self._clock() - arrived_at),
            )

        try:
            request, stop = await self._in_thread(work)
            submitted_at = self._clock()
            answer = self._open(request)
        except RequestError as error:
            self.totals.refused(error)
            raise
        detokenizer = Detokenizer(self.tokenizer, stop)
        first_at: float | None = None
        num_tokens = 0
        try:
            while True:
                token_ids, ended = await answer.next()
                text, num_kept = detokenizer.push(token_ids)
                num_tokens += num_kept
                piece = pb.GenerateResponse(text=text, token_ids=token_ids[:num_kept].tolist())
                if first_at is None:
                    first_at = self._clock()
                    if len(token_ids):
                        self.totals.first_token.observe(first_at - arrived_at)
                    piece.prompt_tokens, piece.request_id = len(request.prompt_token_ids), request.request_id
                if detokenizer.stopped and ended is None:
                    ended = await self._stop(answer)
                if ended is not None:
                    if ended.error is not None and not detokenizer.stopped:
                        if num_kept:
                            yield piece
                        raise ended.error
                    piece.text += detokenizer.finish()
                    self._complete(piece, ended, detokenizer.stopped, num_tokens, (arrived_at, submitted_at, first_at))
                yield piece
                if ended is not None:
                    return
        finally:
            self._close(answer)

    def _complete(
        self, piece: pb.GenerateResponse, ended: Ended, stopped: bool, num_tokens: int, times: tuple[float, float, float]
    ) -> None:
        arrived_at, submitted_at, first_at = times
        total_s = self._clock() - arrived_at
        stages = {"tokenize": submitted_at - arrived_at, **ended.stages}
        stages["deliver"] = max(0.0, total_s - sum(stages.values()))
        self.totals.finished(total_s, stages)
        piece.finish_reason = pb.FINISH_REASON_STOP if stopped else _FINISH_REASONS[ended.finish_reason or ""]
        piece.usage.CopyFrom(
            pb.Usage(prompt_tokens=ended.usage.prompt_tokens, cached_tokens=ended.usage.cached_tokens, completion_tokens=num_tokens)
        )
        piece.timing.CopyFrom(pb.Timing(ttft_s=first_at - arrived_at, total_s=total_s, stages=stages, attempts=ended.attempts))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._num_in_threads >= self._config.max_queue:
            raise Overloaded(f"{self._num_in_threads} requests wait for tokenisation", retry_after_s=TOKENIZER_RETRY_S)
        self._num_in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_in_threads -= 1

    def _open(self, request: ClientRequest) -> "_Answer":
        if request.request_id in self._answers:
            raise InvalidRequest("request_id", request.request_id, "a request of that name is still open")
        self.core.submit(request)
        answer = self._answers[request.request_id] = _Answer(request.request_id)
        self.pump()
        return answer

    async def _stop(self, answer: "_Answer") -> Ended:
        """Ends it for the client's own stop string; tokens past it are dropped."""
        self.core.stop(answer.request_id)
        self.pump()
        ended: Ended | None = None
        while ended is None:
            _, ended = await answer.next()
        return ended

    def _close(self, answer: "_Answer") -> None:
        if answer.ended is None:
            self.core.cancel(answer.request_id)
            self.pump()
        self._answers.pop(answer.request_id, None)


class _Answer:
    """Tokens on their way from the core to one client."""

    __slots__ = ("_tokens", "_wake", "ended", "num_buffered", "overflown", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended: Ended | None = None
        self.num_buffered = 0
        self.overflown = False
        self._tokens: list[Int32] = []
        self._wake = asyncio.Event()

    def push(self, token_ids: Int32) -> int:
        """Returns the number of tokens that now wait for the client."""
        if not self.overflown:
            self._tokens.append(token_ids)
            self.num_buffered += len(token_ids)
            self._wake.set()
        return self.num_buffered

    def end(self, ended: Ended) -> None:
        if self.overflown:
            error = RequestCancelled(f"the client reads too slowly: {self.num_buffered} tokens wait for it")
            ended = ended._replace(finish_reason=None, error=error)
        self.ended = ended
        self._wake.set()

    async def next(self) -> tuple[Int32, Ended | None]:
        """All tokens that wait, at least one unless the answer has ended."""
        while not self._tokens and self.ended is None:
            self._wake.clear()
            await self._wake.wait()
        tokens, self._tokens, self.num_buffered = self._tokens, [], 0
        return np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int32), self.ended
