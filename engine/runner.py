"""What a scheduler hands to a runner and what it gets back: `Batch` out, `StepOutput` in."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from engine.sampling_metadata import SamplingMetadata
from protocol.arrays import Bool, Int32
from protocol.messages import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's work. Arrays have one entry per scheduled sequence, in scheduled order; B = their number.

    B is 0 where there is nothing but `swap_out` to do.

    `token_ids` and `block_tables` are the scheduler's shared arrays, indexed by *row*. What a batch refers to in them
    (tokens and blocks below `num_computed + num_scheduled`) stays as it is until the batch is committed.
    """

    step: int
    rows: Int32
    """[B] row of each sequence in the shared arrays."""
    num_scheduled: Int32
    """[B] tokens to compute now, >= 1; with drafts: 1 + drafts."""
    num_computed: Int32
    """[B] tokens whose KV is already in the cache: the position of the first token of this chunk."""
    sample: Bool
    """[B] True where the chunk ends at the sequence's last known token, so that a next one is to be chosen."""
    token_ids: Int32
    """[num_rows, max_model_len] known tokens (prompt and answer) of every row; shared."""
    block_tables: Int32
    """[num_rows, max_blocks_per_sequence] block ids of every row; shared."""
    request_ids: list[str] = field(default_factory=list)
    """[B] for `num_scheduled_tokens` and logs."""
    sampling: SamplingMetadata | None = None
    """None: every sequence takes the likeliest token and nobody asks for more."""
    num_drafts: Int32 | None = None
    """[B] how many of `num_scheduled` are drafts: they lie in `token_ids` right behind the known tokens. None: no
    drafts anywhere.
    """
    pending: Bool | None = None
    """[B] True where the one token to compute is still being sampled by the step before: not in `token_ids` yet, the
    runner takes it from its own output of that step, same row. None: nowhere (always so while no other step is in
    flight).
    """

    swap_out: Int32 | None = None
    """[n, 2] (block, host block): copied before the batch writes anything, for the blocks have other owners already. On
    a device the copies are ordered before the step, which waits for them."""
    swap_in: Int32 | None = None
    """[n, 2] (host block, block): copied before the step reads or writes, after `swap_out`."""

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled.sum())

    def num_scheduled_tokens(self) -> dict[str, int]:
        """The decision itself: `{request_id: num_tokens}`, in scheduled order."""
        return dict(zip(self.request_ids, self.num_scheduled.tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What the model chose.

    `token_ids`: int32 [B, K], row i valid in its first `counts[i]` columns; counts[i] = 0 where nothing was sampled.
    """

    token_ids: Int32
    counts: Int32
    seconds: float = 0.0
    """Seconds the step took to execute, its copies included."""
    swapped_bytes: int = 0
    """Copied between cache and host, each byte counted once."""
    swap_seconds: float = 0.0
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By index in the batch, of those that asked: one for each of their `counts` tokens."""


class Runner(Protocol):
    """Executes steps on a device. Owns model weights and the KV cache; decides nothing."""

    def execute(self, batch: Batch) -> StepOutput:
        """Computes the batch's tokens, writes their KV into its blocks, samples where asked. Blocking; called from one
        thread.
        """
        ...


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepOutput:
        """Blocks until the step is done. Called once, from any thread, in the order of launches. Raises what `execute`
        raises.
        """
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """Its device takes steps in the order in which they are launched, so that the next can be launched while one is
    computed.
    """

    def launch(self, batch: Batch) -> Launched:
        """Returns when the device has its orders and the batch has been read. Called from one thread."""
        ...
