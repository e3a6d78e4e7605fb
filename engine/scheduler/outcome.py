"""What a scheduler tells its service: `Events` of a schedule, `Committed` of a commit."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.runner import Batch
from engine.scheduler.preemption import Choice
from protocol.arrays import Int32, Int64
from protocol.messages import FinishReason, Logprobs, RequestKey, TokenLogprobs
from protocol.router_link import Rows


class Reserved(NamedTuple):
    """A consumer owns its whole destination. The first `num_cached_tokens` (whole blocks) are there already."""

    key: RequestKey
    block_ids: list[int]
    num_cached_tokens: int


class Finished(NamedTuple):
    """The answer is complete; its blocks are free."""

    key: RequestKey
    request_number: int
    finish_reason: FinishReason


class PromptDone(NamedTuple):
    """The prompt of a "producer" request is computed; `block_ids` (all of the prompt's, in order) belong to the
    receiver of this.
    """

    key: RequestKey
    first_token_id: int
    block_ids: list[int]
    finish_reason: FinishReason | None
    """Set if the first token ends the answer."""
    first_logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Events:
    """What happened beside the batch, in the order it happened."""

    admitted: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, cached tokens): first time in a batch."""
    resumed: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, tokens whose KV was still there, in the prefix cache or on the host): again in a batch after a preemption.
    """
    reserved: list[Reserved] = field(default_factory=list)
    preempted: list[RequestKey] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """How each of `preempted` gets its KV back, and why so."""
    returned: list[RequestKey] = field(default_factory=list)
    """Those of `preempted` that the router is to place anew; the scheduler has forgotten them."""
    ended: list[tuple[RequestKey, Literal["length"]]] = field(default_factory=list)
    """Outgrew the pool; blocks are free."""


@dataclass(slots=True, kw_only=True)
class Committed:
    """One step's results. The arrays have one entry per sequence that got tokens, in scheduled order, as `StepTokens`
    wants them.
    """

    batch: Batch
    request_numbers: Int64
    attempts: Int32
    offsets: Int32
    counts: Int32
    token_ids: Int32
    """Flat: row i owns the next `counts[i]` entries."""
    finished: list[Finished] = field(default_factory=list)
    prompts: list[PromptDone] = field(default_factory=list)
    progressed: list[tuple[RequestKey, int]] = field(default_factory=list)
    """(key, tokens computed) of "producer" requests whose prompt is not done yet."""
    first: list[RequestKey] = field(default_factory=list)
    """Got the first token they got here."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of the tokens above, where asked for."""

    @property
    def rows(self) -> Rows:
        """The arrays as the router's link wants them."""
        return Rows(
            request_numbers=self.request_numbers,
            attempts=self.attempts,
            offsets=self.offsets,
            counts=self.counts,
            token_ids=self.token_ids,
            logprobs=tuple(self.logprobs),
        )
