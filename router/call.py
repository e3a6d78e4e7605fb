"""One open call: its answers, the tokens that wait for its client, and the pieces in which they go out.

Nothing here knows a transport: a front door encodes each `Piece` in its own way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import DeadlineExceeded, RequestCancelled, RequestError
from protocol.messages import FinishReason, TokenLogprobs
from router.buffer import Buffer
from router.detokenizer import Detokenizer
from router.parse import Parsed
from router.request import Ended, Path, Usage
from router.tokenizer import Tokenizer
from router.tracing import CallTrace

DEADLINE_ROUNDING, DEADLINE_TRAVEL_S = 0.01, 0.05
"""A deadline passes at the client first: gRPC adds up to this share before it sends it, and sending it takes time."""


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
        "answers",
        "arrived_at",
        "begun",
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
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called whenever an answer has got tokens or its end."""
        self.request_id, self.deadline_s = parsed.request_id, deadline_s
        self.arrived_at, self.submitted_at, self.trace = arrived_at, submitted_at, trace
        self.num_prompt_tokens = len(parsed.requests[0].prompt_token_ids)
        self.first = 0
        """The number of its first answer in the messages to the core. The others follow."""
        self.begun = False
        """Whether its first piece has been made."""
        self._closing: Callable[[], None] | None = None
        self.answers = [
            Answer(index, parsed, tokenizer, Buffer(max_buffered_tokens), wake, self._ended)
            for index in range(len(parsed.requests))
        ]

    @property
    def open(self) -> list[int]:
        """The numbers of its answers that have not ended."""
        return [self.first + answer.index for answer in self.answers if answer.ended is None]

    def when_ended(self, closed: Callable[[], None]) -> None:
        """Calls `closed` once all answers have ended: now, or later."""
        self._closing = closed
        self._ended()

    def _ended(self) -> None:
        """Takes note that an answer may have ended."""
        if self._closing is not None and not self.open:
            closing, self._closing = self._closing, None
            closing()

    def waiting(self) -> list["Answer"]:
        """Returns the answers that have tokens for the client or have ended, and are unfinished."""
        return [answer for answer in self.answers if answer.has_news]

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
        "_has_ended",
        "_wake",
        "detokenizer",
        "ended",
        "finish",
        "first_at",
        "index",
        "num_tokens",
        "plain",
        "stopping",
        "told",
    )

    def __init__(
        self,
        index: int,
        parsed: Parsed,
        tokenizer: Tokenizer,
        buffer: Buffer,
        wake: Callable[[], None],
        has_ended: Callable[[], None],
    ) -> None:
        self.index = index
        sampling = parsed.requests[index].sampling
        self.detokenizer = Detokenizer(
            tokenizer, parsed.stop, include_stop=parsed.include_stop, min_tokens=sampling.min_tokens
        )
        self.plain = not parsed.stop and sampling.logprobs is None
        """Whether its pieces have text and tokens alone, but for the first and the last one."""
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
        self._buffer, self._wake, self._has_ended = buffer, wake, has_ended

    @property
    def has_news(self) -> bool:
        return self.finish is None and (len(self._buffer) > 0 or self.ended is not None)

    @property
    def num_waiting(self) -> int:
        """How many tokens wait for the client."""
        return len(self._buffer)

    @property
    def must_wait(self) -> bool:
        """Whether its next piece has tokens, so that a client that takes no more tokens can get nothing."""
        failed = self.ended is not None and self.ended.error is not None
        return len(self._buffer) > 0 and not failed and not self.detokenizer.stopped

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        """Adds tokens. Returns True if too many wait for the client now."""
        self._wake()
        return self._buffer.push(token_ids, logprobs)

    def end(self, ended: Ended) -> None:
        self.ended = self._buffer.end(ended)
        self._wake()
        self._has_ended()

    def take(self, max_tokens: int | None = None) -> tuple[list[int], list[TokenLogprobs]]:
        """Takes the tokens that wait, at most `max_tokens`, and their logprobs if there are any."""
        return self._buffer.take(max_tokens)

    def take_plain(self, max_tokens: int) -> tuple[str, list[int]] | None:
        """Takes the next piece of a `plain` answer that has begun and not ended: text and token ids. Returns None if
        there are none, or more than `max_tokens`. It is `take` and all that makes a piece of it, the short way.
        """
        token_ids = self._buffer.take_plain(max_tokens)
        if not token_ids:
            return None
        self.num_tokens += len(token_ids)
        return self.detokenizer.push(token_ids)[0], token_ids


def gone(waited_s: float, deadline_s: float | None) -> RequestError:
    """How a call ends whose client did not wait for the end: its deadline has passed, or the client cancelled.
    `waited_s`: seconds since it arrived.
    """
    if deadline_s is not None and waited_s >= deadline_s * (1 - DEADLINE_ROUNDING) - DEADLINE_TRAVEL_S:
        return DeadlineExceeded(f"deadline: {deadline_s:g} s have passed")
    return RequestCancelled("the client is gone")
