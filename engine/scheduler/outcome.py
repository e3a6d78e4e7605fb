"""What a scheduler tells its service: `Events` of a schedule, `Committed` of a commit."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.runner import Batch
from engine.scheduler.preemption import Choice
from protocol.arrays import Int32, Int64
from protocol.messages import FinishReason, Logprobs, RequestKey, TokenLogprobs
from protocol.router_link import Rows


class Reserved(NamedTuple):
    """A consumer owns its whole destination. The first `num_cached_tokens` tokens (whole blocks) are there already."""

    key: RequestKey
    block_ids: list[int]
    num_cached_tokens: int


class Finished(NamedTuple):
    """The answer is complete; its blocks are free."""

    key: RequestKey
    request_number: int
    finish_reason: FinishReason


class PromptDone(NamedTuple):
    """The prompt of a "producer" request is computed. Whoever receives this owns `block_ids`, all blocks of the
    prompt in order.
    """

    key: RequestKey
    first_token_id: int
    block_ids: list[int]
    finish_reason: FinishReason | None
    """Why the first token ends the answer; None if it does not."""
    first_logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Events:
    """What happened beside the batch, in the order in which it happened."""

    admitted: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, cached tokens) of requests that are in a batch for the first time."""
    resumed: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, tokens whose KV the prefix cache or the host still had) of requests that run again after a preemption."""
    reserved: list[Reserved] = field(default_factory=list)
    preempted: list[RequestKey] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """How each request in `preempted` gets its KV back, and why in this way."""
    returned: list[RequestKey] = field(default_factory=list)
    """Requests in `preempted` that the router is to place anew; the scheduler has forgotten them."""
    ended: list[tuple[RequestKey, Literal["length"]]] = field(default_factory=list)
    """Requests that have outgrown the pool; their blocks are free."""


@dataclass(slots=True, kw_only=True)
class Committed:
    """One step's results. The arrays have one entry per sequence that got tokens, in scheduled order, as
    in `StepTokens`.
    """

    batch: Batch
    request_numbers: Int64
    attempts: Int32
    offsets: Int32
    counts: Int32
    token_ids: Int32
    """The tokens of all rows, one row after the other: row i owns the next `counts[i]` entries."""
    finished: list[Finished] = field(default_factory=list)
    prompts: list[PromptDone] = field(default_factory=list)
    progressed: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, tokens computed) of "producer" requests whose prompt is not done yet."""
    first: list[RequestKey] = field(default_factory=list)
    """Requests that got their first token from this engine."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Log probabilities of the tokens above, for requests that asked."""

    @property
    def rows(self) -> Rows:
        """The arrays in the form that the router's link takes."""
        return Rows(
            request_numbers=self.request_numbers,
            attempts=self.attempts,
            offsets=self.offsets,
            counts=self.counts,
            token_ids=self.token_ids,
            logprobs=tuple(self.logprobs),
        )
