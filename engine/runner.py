"""What a scheduler and a runner exchange: a `Batch` goes to the runner, a `StepOutput` comes back."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from engine.sampling_metadata import SamplingMetadata
from protocol.arrays import Bool, Int32
from protocol.messages import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's work. Arrays have one entry for each of the B scheduled sequences, in scheduled order. B is 0 where
    there is nothing but `swap_out` to do.

    `token_ids` and `block_tables` are the scheduler's shared arrays, indexed by *row*. The tokens and blocks to which a
    batch refers there (those below `num_computed + num_scheduled`) do not change until the batch is committed.
    """

    step: int
    rows: Int32
    """[B] The row of each sequence in the shared arrays."""
    num_scheduled: Int32
    """[B] Tokens to compute now, at least 1; with drafts, 1 + drafts."""
    num_computed: Int32
    """[B] Tokens whose KV is already in the cache. This is the position of the first token of the chunk."""
    sample: Bool
    """[B] True where the chunk ends at the sequence's last known token, so that the next token is to be chosen."""
    token_ids: Int32
    """[num_rows, max_model_len] The known tokens (prompt and answer) of every row; shared."""
    block_tables: Int32
    """[num_rows, max_blocks_per_sequence] The block ids of every row; shared."""
    request_ids: list[str] = field(default_factory=list)
    """[B] Request ids, for `num_scheduled_tokens` and logs."""
    sampling: SamplingMetadata | None = None
    """How tokens are chosen; None if every sequence takes the likeliest token and no more is asked for."""
    num_drafts: Int32 | None = None
    """[B] How many of `num_scheduled` are drafts. They are in `token_ids`, right behind the known tokens. None if there
    are no drafts at all.
    """
    pending: Bool | None = None
    """[B] True where the one token to compute is still being sampled by the step before. It is not in `token_ids` yet:
    the runner takes it from its own output of that step, from the same row. None where there is no such sequence, as
    always while no other step is in flight.
    """

    swap_out: Int32 | None = None
    """[n, 2] (block, host block) pairs, copied before the batch writes anything, since the blocks have other owners
    already. On a device the copies are ordered before the step, which waits for them.
    """
    swap_in: Int32 | None = None
    """[n, 2] (host block, block) pairs, copied after `swap_out` and before the step reads or writes."""

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled.sum())

    def num_scheduled_tokens(self) -> dict[str, int]:
        """The scheduler's decision: `{request_id: num_tokens}`, in scheduled order."""
        return dict(zip(self.request_ids, self.num_scheduled.tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """The tokens that the model chose."""

    token_ids: Int32
    """[B, K] Row i is valid in its first `counts[i]` columns."""
    counts: Int32
    """[B] Tokens chosen for each sequence; 0 where nothing was sampled."""
    seconds: float = 0.0
    """Seconds that the step took to execute, its copies included."""
    swapped_bytes: int = 0
    """Bytes copied between cache and host, each counted once."""
    swap_seconds: float = 0.0
    """Seconds that these copies took."""
    compiled: tuple[str, ...] = ()
    """Variants of kernels that were compiled since the step before; none are expected once an engine has started."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """For each sequence that asked, by its index in the batch, one entry per chosen token."""
    failures: dict[int, str] = field(default_factory=dict)
    """By its index in the batch, why a sequence cannot go on, whatever is tried; its tokens mean nothing."""


class Runner(Protocol):
    """Executes steps on a device. It owns the model's weights and the KV cache, and decides nothing."""

    def execute(self, batch: Batch) -> StepOutput:
        """Computes the batch's tokens, writes their KV into its blocks, and samples where asked. It blocks, and is
        called from one thread only.
        """
        ...


class Launched(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Blocks until the step is done. It is called once per step, from any thread, in the order of launches. Raises
        what `execute` raises.
        """
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner whose device takes steps in the order in which they are launched, so that the next step can be launched
    while one is computed.
    """

    def launch(self, batch: Batch) -> Launched:
        """Returns when the device has its orders and the batch has been read. It is called from one thread only."""
        ...
