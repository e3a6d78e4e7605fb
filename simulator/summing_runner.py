"""The arithmetic model made fast: the same tokens without a cache."""

from functools import cache
from typing import NewType

import numpy as np

from engine.runner import Batch, StepOutput
from engine.runners import arithmetic_model
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import MULTIPLIER, PRIME, VOCAB_SIZE
from jit.loops_compile import compiled_loop, one_compiles, put_compiled
from protocol.arrays import Bool, Int32, Int64

SOURCES = (__file__, arithmetic_model.__file__)

Rows = NewType("Rows", Int32)
NumComputed = NewType("NumComputed", Int32)
NumScheduled = NewType("NumScheduled", Int32)
TokenIds = NewType("TokenIds", Int32)
Sums = NewType("Sums", Int64)
"""[NUM_LINES, num_rows]"""

SUM, NUM_SUMMED = range(2)
"""The sum of a row's KV, and over how many of its first positions."""
NUM_LINES = 2


@compiled_loop(SOURCES)
def sum_up(
    rows: Rows,
    num_computed: NumComputed,
    num_scheduled: NumScheduled,
    sample: Bool,
    token_ids: TokenIds,
    state: Sums,
    targets: Int32,
) -> None:
    """Brings the sum of each row of a batch up to its last scheduled token, and writes the token that the model says
    next to `targets` [B, 1]. The sum of a row that another sequence has taken begins anew.
    """
    sums, num_summed = state[SUM], state[NUM_SUMMED]
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
    line, plane, sums = np.zeros(0, np.int32), np.zeros((0, 0), np.int32), Sums(np.zeros((NUM_LINES, 0), np.int64))
    put_compiled(globals())
    with one_compiles(SOURCES):
        sum_up(Rows(line), NumComputed(line), NumScheduled(line), np.zeros(0, np.bool_), TokenIds(plane), sums, plane)


class SummingRunner(ArithmeticRunner):
    """The arithmetic model without its cache: no KV is written, and the sum of a row is carried from step to step.

    It is for runs without drafts and temperature, in which no other sequence takes a row while it decodes.
    """

    def __init__(self, cache: Int64, *, num_host_blocks: int = 0) -> None:
        super().__init__(cache, num_host_blocks=num_host_blocks)
        compile_all()
        self._sums = Sums(np.zeros((NUM_LINES, 0), np.int64))

    def execute(self, batch: Batch) -> StepOutput:
        if not self._sums.size:
            self._sums = Sums(np.zeros((NUM_LINES, len(batch.token_ids)), np.int64))
        rows, num_computed = Rows(batch.rows), NumComputed(batch.num_computed)
        num_scheduled = NumScheduled(batch.num_scheduled)
        targets = np.empty((len(rows), 1), np.int32)
        sum_up(rows, num_computed, num_scheduled, batch.sample, TokenIds(batch.token_ids), self._sums, targets)
        return StepOutput(token_ids=targets, counts=batch.sample.astype(np.int32))
