"""The arithmetic model for speed: the same tokens without a cache."""

from functools import cache

import numpy as np

from engine.loops_compile import compiled_loop, one_compiles, put_compiled
from engine.runner import Batch, StepOutput
from engine.runners import arithmetic_model
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import MULTIPLIER, PRIME, VOCAB_SIZE
from protocol.arrays import Bool, Int32, Int64

SOURCES = (__file__, arithmetic_model.__file__)


@compiled_loop(SOURCES)
def sum_up(
    rows: Int32, num_computed: Int32, num_scheduled: Int32, sample: Bool, token_ids: Int32, sums: Int64, num_summed: Int64, targets: Int32
) -> None:
    """Brings the sum of each row of a batch up to its last scheduled token and writes the token that the model says after that.

    `sums`, `num_summed`: [num_rows] kv over so many first positions; a row that changed hands begins anew. `targets`: [B, 1].
    """
    for i in range(len(rows)):
        row, end = rows[i], num_computed[i] + num_scheduled[i]
        if num_summed[row] != num_computed[i]:
            sums[row] = num_summed[row] = 0
        for position in range(num_summed[row], end):
            sums[row] += (np.int64(token_ids[row, position]) + 1) * (position + 1)
        num_summed[row] = end
        targets[i, 0] = sums[row] % PRIME * MULTIPLIER % PRIME % VOCAB_SIZE if sample[i] else 0


@cache
def compile_all() -> None:
    """Calls the loop once, with nothing to do."""
    line, plane, sums = np.zeros(0, np.int32), np.zeros((0, 0), np.int32), np.zeros(0, np.int64)
    put_compiled(globals())
    with one_compiles(SOURCES):
        sum_up(line, line, line, np.zeros(0, np.bool_), plane, sums, sums, plane)


class SummingRunner(ArithmeticRunner):
    """The arithmetic model without its cache: no KV is written, a row's sum is carried from step to step.

    For runs without drafts and temperature in which a row that decodes never changes hands.
    """

    def __init__(self, cache: Int64, *, num_host_blocks: int = 0) -> None:
        super().__init__(cache, num_host_blocks=num_host_blocks)
        compile_all()
        self._state = np.zeros((2, 0), np.int64)
        """`sums` and `num_summed`."""

    def execute(self, batch: Batch) -> StepOutput:
        if not self._state.size:
            self._state = np.zeros((2, len(batch.token_ids)), np.int64)
        targets = np.empty((len(batch.rows), 1), np.int32)
        sums, num_summed = self._state
        sum_up(batch.rows, batch.num_computed, batch.num_scheduled, batch.sample, batch.token_ids, sums, num_summed, targets)
        return StepOutput(token_ids=targets, counts=batch.sample.astype(np.int32))
