"""The shipped fake: runs the model of arithmetic_model.py over a paged cache."""

from collections.abc import Callable

import numpy as np

from engine.row_sampling import GREEDY_BELOW
from engine.runner import Batch, StepOutput
from engine.runners import arithmetic_loops
from engine.runners.arithmetic_model import PRIME, VOCAB_SIZE, expected_logprobs
from engine.runners.host_copies import HostCopies, nothing_sampled
from protocol.arrays import Int32, Int64
from protocol.messages import TokenLogprobs


class ArithmeticRunner:
    """Runs the arithmetic model over a paged cache, int64 [num_blocks, block_size]; strides are free.

    Of the sampling parameters it heeds temperature (0 or not) and seed. Logprobs it invents: `expected_logprobs`.

    `step_seconds`: what a step is said to have taken; without it `StepOutput.seconds` stays 0.
    """

    def __init__(
        self,
        cache: Int64,
        vocab_size: int = VOCAB_SIZE,
        step_seconds: Callable[[Batch], float] | None = None,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        arithmetic_loops.compile_all()
        self.copies = HostCopies(cache, num_host_blocks)
        self._last = np.zeros(0, np.int32)
        """[num_rows] the newest token of every row, for batches in which it is still pending."""

    def execute(self, batch: Batch) -> StepOutput:
        swapped_bytes, swap_seconds = self.copies.run(batch)
        size = len(batch.rows)
        if not size:
            return nothing_sampled(swapped_bytes, swap_seconds)
        if len(self._last) < len(batch.token_ids):  # before it is read, too: the step before may have failed
            self._last = np.resize(self._last, len(batch.token_ids))
        num_drafts = batch.num_drafts if batch.num_drafts is not None else np.zeros(size, np.int32)
        pending = batch.pending if batch.pending is not None else np.zeros(size, np.bool_)
        shared = self._last, batch.token_ids, batch.block_tables
        arithmetic_loops.write(self._cache, batch.rows, batch.num_computed, batch.num_scheduled, pending, *shared)
        token_ids, counts = np.zeros((size, 1 + num_drafts.max()), np.int32), np.empty(size, np.int32)
        num_known = batch.num_computed + batch.num_scheduled - num_drafts
        arithmetic_loops.sample(
            *(self._cache, batch.rows, num_known, num_drafts, batch.sample, *_noise(batch), *shared),
            *(self._vocab_size, token_ids, counts),
        )
        seconds = self._step_seconds(batch) if self._step_seconds else 0.0
        return StepOutput(
            token_ids=token_ids,
            counts=counts,
            seconds=seconds,
            swapped_bytes=swapped_bytes,
            swap_seconds=swap_seconds,
            logprobs=self._logprobs(batch, token_ids, counts),
        )

    def _logprobs(self, batch: Batch, token_ids: Int32, counts: Int32) -> dict[int, list[TokenLogprobs]]:
        if batch.sampling is None:
            return {}
        num_top = batch.sampling.num_logprobs[batch.rows]
        return {
            index: [expected_logprobs(token, int(num_top[index]), self._vocab_size) for token in token_ids[index, : counts[index]].tolist()]
            for index in np.flatnonzero((num_top >= 0) & (counts > 0)).tolist()
        }


def _noise(batch: Batch) -> tuple[Int64, Int32]:
    """(seed, index in the whole answer less position) of each sequence, [B]; a greedy one's seed is 0."""
    if batch.sampling is None:
        return np.zeros(len(batch.rows), np.int64), np.zeros(len(batch.rows), np.int32)
    sampling, rows = batch.sampling, batch.rows
    seeds = np.where(sampling.temperatures[rows] >= GREEDY_BELOW, sampling.seeds[rows] % PRIME, 0).astype(np.int64)
    return seeds, sampling.answer_bases[rows].astype(np.int32)
