"""An accepted request inside the router, and the events that tell the front door about it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from protocol.errors import RequestError
from protocol.messages import Address, EngineRequest, FinishReason, RequestKey, TokenLogprobs
from router.admission import ClientRequest
from router.policy import NO_LOAD, AttemptLoad

Path = Literal["disaggregated", "prefill_only", "colocated"]
"""Where an attempt really ran, whatever it was dispatched as."""


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Delivered(NamedTuple):
    """New tokens of one engine step. The next `counts[i]` of `token_ids` continue the answer to `request_ids[i]`,
    without gap or repeat. Nobody changes the lists.
    """

    request_ids: list[str]
    token_ids: list[int]
    counts: list[int]
    """Each is at least 1. An empty list stands for one token per request."""
    logprobs: dict[str, tuple[TokenLogprobs, ...]]
    """By request id, one entry per token; only of requests that asked for logprobs."""

    def rows(self) -> Iterator[tuple[str, list[int]]]:
        """Yields each request id with its new tokens."""
        start, counts = 0, self.counts or [1] * len(self.request_ids)
        for request_id, count in zip(self.request_ids, counts, strict=True):
            yield request_id, self.token_ids[start : start + count]
            start += count


class Ended(NamedTuple):
    """The one terminal event of a request, with either a finish reason or an error. `stages`: seconds, which add up to
    the request's time in the router.
    """

    request_id: str
    finish_reason: FinishReason | None
    error: RequestError | None
    usage: Usage
    stages: dict[str, float]
    attempts: int
    path: Path
    """Where the last attempt ran."""


@dataclass(slots=True)
class ActiveRequest:
    """An accepted request that is not closed. It is QUEUED while it has no `key` and ACTIVE while it has one."""

    request: ClientRequest
    request_number: int
    max_tokens: int
    door: Address | None
    """Where it came in."""
    accepted_at: float
    since: float
    """When it was last queued or dispatched."""
    key: RequestKey | None = None
    hashes: list[bytes] | None = None
    """Hashes of the full blocks of its prompt; None until a policy wants them."""
    attempt: int = 0
    num_failures: int = 0
    prefill: Address | None = None
    """None if decode serves colocated, or has taken over from a prefill engine that died."""
    decode: Address | None = None
    prefill_load: AttemptLoad = NO_LOAD
    decode_load: AttemptLoad = NO_LOAD
    """The loads as booked at dispatch, so that the same amounts are taken off at the end."""
    split: bool = False
    """Whether this attempt was given to a prefill engine too."""
    decode_seen: bool = False
    """Whether decode has sent tokens of this attempt, so that it no longer needs prefill."""
    delivered: list[int] = field(default_factory=list)
    delivered_at: float = 0.0
    """When its last tokens came."""
    first_offset: int = 0
    """How many tokens were delivered when the present attempt began."""
    num_cached_tokens: int | None = None
    """Cached tokens of its prompt when its first attempt began; None until an engine has reported them."""
    stages: dict[str, float] = field(default_factory=dict)
    attempt_stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, as the engines of the present attempt report them."""

    @property
    def about(self) -> dict[str, object]:
        """Fields of log lines about its present attempt."""
        return {"request_id": self.request.request_id, "attempt": self.attempt}

    @property
    def path(self) -> Path:
        """Where its last attempt has run so far."""
        return "colocated" if not self.split else "disaggregated" if self.decode_seen else "prefill_only"

    def engine_request(self, now: float) -> EngineRequest:
        """Returns the present attempt as its decode engine gets it: delivered tokens are part of the prompt there."""
        assert self.key is not None
        request, prompt = self.request, self.request.prompt_token_ids
        if self.delivered:
            prompt = np.concatenate([prompt, np.asarray(self.delivered, dtype=np.int32)])
        return EngineRequest(
            key=self.key,
            request_number=self.request_number,
            role="colocated" if self.prefill is None else "decode",
            peer=self.prefill,
            prompt_token_ids=prompt,
            offset=len(self.delivered),
            max_tokens=self.max_tokens - len(self.delivered),
            sampling=request.sampling,
            priority=request.priority,
            deadline_s=None if request.deadline_s is None else max(0.0, self.accepted_at + request.deadline_s - now),
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
        )

    def spent(self, stage: str, now: float) -> None:
        """Books the time since the last change of state on `stage`."""
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self.since
        self.since = now

    def close_stages(self, now: float) -> dict[str, float]:
        """Returns all stages. Time that the engines do not account for was spent between processes: `messages`."""
        if self.key is None:
            self.spent("router_queue", now)
            return self.stages
        on_the_way_s = now - self.since - sum(self.attempt_stages.values())
        self.stages.update(self.attempt_stages, messages=max(0.0, on_the_way_s))
        return self.stages
