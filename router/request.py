"""One accepted request inside the router, and what its front door is told about it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.errors import RequestError
from protocol.messages import Address, FinishReason, RequestKey, TokenLogprobs
from router.admission import ClientRequest
from router.policy import NO_LOAD, AttemptLoad

Path = Literal["disaggregated", "prefill_only", "colocated"]
"""Where an attempt really ran."""


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Delivered(NamedTuple):
    """New tokens of one engine step: `counts[i]` of `token_ids` go on with the answer to `request_ids[i]`, without gap
    or repeat.

    Lists are to be read, not to be changed.
    """

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int]
    """Each at least 1; empty: one for each request."""
    logprobs: dict[str, tuple[TokenLogprobs, ...]]
    """By request id, one for each of its tokens, of those that asked."""

    def rows(self) -> Iterator[tuple[str, list[int]]]:
        """(request id, its new tokens)."""
        start, counts = 0, self.counts or [1] * len(self.request_ids)
        for request_id, count in zip(self.request_ids, counts, strict=True):
            yield request_id, self.token_ids[start : start + count]
            start += count


class Ended(NamedTuple):
    """The one terminal event of a request: a finish reason, or an error. `stages`: seconds, they sum to its time in the
    router.
    """

    request_id: str
    finish_reason: FinishReason | None
    error: RequestError | None
    usage: Usage
    stages: dict[str, float]
    attempts: int
    path: Path
    """Of the last attempt."""


@dataclass(slots=True)
class ActiveRequest:
    """An accepted request that is not closed: QUEUED while it has no `key`, ACTIVE while it has one."""

    request: ClientRequest
    request_number: int
    max_tokens: int
    accepted_at: float
    since: float
    """When it was queued or dispatched last."""
    key: RequestKey | None = None
    hashes: list[bytes] | None = None
    """Of the full blocks of its prompt; None until a policy wants them."""
    attempt: int = 0
    num_failures: int = 0
    prefill: Address | None = None
    """None when decode serves colocated, or has taken over from an engine that died."""
    decode: Address | None = None
    prefill_load: AttemptLoad = NO_LOAD
    decode_load: AttemptLoad = NO_LOAD
    """As booked at dispatch, so that the same is taken off at the end."""
    split: bool = False
    """This attempt was given to a prefill engine too."""
    decode_seen: bool = False
    """Decode has sent tokens of this attempt: it needs prefill no more."""
    delivered: list[int] = field(default_factory=list)
    delivered_at: float = 0.0
    """When the last tokens came."""
    first_offset: int = 0
    """Tokens that were delivered when the present attempt began."""
    num_cached_tokens: int | None = None
    """Of its prompt, when its first attempt began; None: not told yet."""
    stages: dict[str, float] = field(default_factory=dict)
    attempt_stages: dict[str, float] = field(default_factory=dict)
    """As the engines of the present attempt report them."""

    @property
    def about(self) -> dict[str, object]:
        """The fields of a log line about its present attempt."""
        return {"request_id": self.request.request_id, "attempt": self.attempt}

    @property
    def path(self) -> Path:
        """Of its last attempt, so far."""
        return "colocated" if not self.split else "disaggregated" if self.decode_seen else "prefill_only"

    def spent(self, stage: str, now: float) -> None:
        """Books the time since the last change of state."""
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self.since
        self.since = now

    def close_stages(self, now: float) -> dict[str, float]:
        """All stages. What an attempt's engines do not account for was spent between processes: `messages`."""
        if self.key is None:
            self.spent("router_queue", now)
            return self.stages
        on_the_way_s = now - self.since - sum(self.attempt_stages.values())
        self.stages.update(self.attempt_stages, messages=max(0.0, on_the_way_s))
        return self.stages
