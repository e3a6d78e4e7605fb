"""One open call: its answers, the tokens that wait for its client, and the pieces in which they go out.

Nothing here knows a transport: a front door encodes each `Piece` in its own way.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from protocol.messages import FinishReason, TokenLogprobs
from router.buffer import Buffer
from router.detokenizer import Detokenizer
from router.parse import Parsed
from router.request import Ended, Path, Usage
from router.tokenizer import Tokenizer
from router.tracing import CallTrace


class Timing(NamedTuple):
    """Seconds from the arrival of the call. The `stages` add up to `total_s`."""

    ttft_s: float
    total_s: float
    stages: dict[str, float]
    attempts: int


@dataclass(slots=True)
class Piece:
    """The next part of one answer. Its text may lag behind its tokens."""

    index: int
    """The answer's index among the `n` answers of the call."""
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One entry per token id if the request asked for logprobs, else none."""
    request_id: str | None = None
    """Set in the call's first piece only, like `prompt_tokens`."""
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None
    """Set in each answer's last piece only."""
    usage: Usage | None = None
    """Set in the call's last piece only, like `timing`; it covers all answers."""
    timing: Timing | None = None


class Finish(NamedTuple):
    """How a complete answer ended: its last piece says it, and it is counted once the client has that piece."""

    reason: FinishReason
    path: Path
    total_s: float
    stages: dict[str, float]


class Call:
    """One call and its answers, which all continue the same prompt. Times are seconds of the front door's clock."""

    __slots__ = (
        "_closing",
        "_wake",
        "answers",
        "arrived_at",
        "deadline_s",
        "first",
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
        self.first = 0
        """The number of its first answer in the messages to the core. The others follow."""
        self._wake = asyncio.Event()
        self._closing: Callable[[], None] | None = None
        self.answers = [
            Answer(index, parsed, tokenizer, Buffer(max_buffered_tokens), self._news)
            for index in range(len(parsed.requests))
        ]

    @property
    def open(self) -> list[int]:
        """The numbers of its answers that have not ended."""
        return [self.first + answer.index for answer in self.answers if answer.ended is None]

    def when_ended(self, closed: Callable[[], None]) -> None:
        """Calls `closed` once all answers have ended: now, or later."""
        self._closing = closed
        self._news()

    def _news(self) -> None:
        self._wake.set()
        if self._closing is not None and not self.open:
            closing, self._closing = self._closing, None
            closing()

    async def news(self) -> list["Answer"]:
        """Waits until an answer has tokens for the client or has ended, and returns all such answers. At least one
        answer must still be unfinished.
        """
        while True:
            self._wake.clear()
            if waiting := [answer for answer in self.answers if answer.has_news]:
                return waiting
            await self._wake.wait()

    def finish(self, answer: "Answer", ended: Ended, piece: Piece, now: float) -> None:
        """Completes an answer's last piece. The last piece of the call also gets the usage and the timing."""
        reason = "stop" if answer.detokenizer.stopped else ended.finish_reason
        assert reason is not None
        piece.finish_reason = reason
        total_s = now - self.arrived_at
        stages = {"tokenize": self.submitted_at - self.arrived_at, **ended.stages}
        stages["deliver"] = max(0.0, total_s - sum(stages.values()))
        answer.finish = Finish(reason, ended.path, total_s, stages)
        if not all(other.finish for other in self.answers):
            return
        ends = [other.ended for other in self.answers if other.ended is not None]
        piece.usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=ends[0].usage.cached_tokens,
            completion_tokens=sum(other.num_tokens for other in self.answers),
        )
        first_at = min(now if other.first_at is None else other.first_at for other in self.answers)
        attempts = max(end.attempts for end in ends)
        piece.timing = Timing(first_at - self.arrived_at, total_s, stages, attempts)


class Answer:
    """One answer of a call: its tokens on their way from the core to the client."""

    __slots__ = (
        "_buffer",
        "_news",
        "detokenizer",
        "ended",
        "finish",
        "first_at",
        "index",
        "num_tokens",
        "stopping",
        "told",
    )

    def __init__(
        self, index: int, parsed: Parsed, tokenizer: Tokenizer, buffer: Buffer, news: Callable[[], None]
    ) -> None:
        self.index = index
        min_tokens = parsed.requests[index].sampling.min_tokens
        self.detokenizer = Detokenizer(tokenizer, parsed.stop, include_stop=parsed.include_stop, min_tokens=min_tokens)
        self.ended: Ended | None = None
        self.first_at: float | None = None
        """When the client's first piece was taken from the buffer."""
        self.num_tokens = 0
        """How many tokens of the answer went into pieces."""
        self.finish: Finish | None = None
        self.told = False
        """Whether the connection has taken the last piece."""
        self.stopping = False
        """Whether the core has been told that a stop string is complete."""
        self._buffer, self._news = buffer, news

    @property
    def has_news(self) -> bool:
        return self.finish is None and (len(self._buffer) > 0 or self.ended is not None)

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        """Adds tokens. Returns True if too many wait for the client now."""
        self._news()
        return self._buffer.push(token_ids, logprobs)

    def end(self, ended: Ended) -> None:
        self.ended = self._buffer.end(ended)
        self._news()

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        return self._buffer.take()
