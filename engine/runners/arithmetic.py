"""The shipped fake: runs the model of arithmetic_model.py over a paged cache."""

from collections.abc import Callable

import numpy as np

from engine.runner import Batch, StepOutput
from engine.runners import arithmetic_loops as loops
from engine.runners.arithmetic_loops import BlockTables, Newest, Seeds, Targets, TokenIds, Work
from engine.runners.arithmetic_model import PRIME, VOCAB_SIZE, expected_logprobs
from engine.runners.host_copies import HostCopies, nothing_sampled
from engine.sampling_metadata import GREEDY_BELOW
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
        loops.compile_all()
        self.copies = HostCopies(cache, num_host_blocks)
        self._newest = Newest(np.zeros(0, np.int32))
        """For batches in which it is still pending."""

    def execute(self, batch: Batch) -> StepOutput:
        swapped_bytes, swap_seconds = self.copies.run(batch)
        size = len(batch.rows)
        if not size:
            return nothing_sampled(swapped_bytes, swap_seconds)
        if len(self._newest) < len(batch.token_ids):  # before it is read, too: the step before may have failed
            self._newest = Newest(np.resize(self._newest, len(batch.token_ids)))
        work, seeds = _work(batch), _seeds(batch)
        shared = self._newest, TokenIds(batch.token_ids), BlockTables(batch.block_tables)
        loops.write(self._cache, work, *shared)
        token_ids = Targets(np.zeros((size, 1 + work[loops.NUM_DRAFTS].max()), np.int32))
        counts = np.empty(size, np.int32)
        loops.sample(self._cache, work, seeds, *shared, self._vocab_size, token_ids, counts)
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
            index: [
                expected_logprobs(token, int(num_top[index]), self._vocab_size)
                for token in token_ids[index, : counts[index]].tolist()
            ]
            for index in np.flatnonzero((num_top >= 0) & (counts > 0)).tolist()
        }


def _work(batch: Batch) -> Work:
    work = Work(np.zeros((loops.NUM_LINES, len(batch.rows)), np.int32))
    work[loops.ROW] = batch.rows
    work[loops.NUM_COMPUTED] = batch.num_computed
    work[loops.NUM_SCHEDULED] = batch.num_scheduled
    work[loops.SAMPLED] = batch.sample
    if batch.num_drafts is not None:
        work[loops.NUM_DRAFTS] = batch.num_drafts
    if batch.pending is not None:
        work[loops.PENDING] = batch.pending
    if batch.sampling is not None:
        work[loops.BASE] = batch.sampling.answer_bases[batch.rows]
    return work


def _seeds(batch: Batch) -> Seeds:
    if batch.sampling is None:
        return Seeds(np.zeros(len(batch.rows), np.int64))
    sampling, rows = batch.sampling, batch.rows
    return Seeds(
        np.where(sampling.temperatures[rows] >= GREEDY_BELOW, sampling.seeds[rows] % PRIME, 0).astype(np.int64)
    )
