"""A step of the arithmetic model as plain loops, compiled like those of the scheduler."""

from functools import cache
from typing import NewType

import numpy as np

from engine.runners import arithmetic_model
from engine.runners.arithmetic_model import MULTIPLIER, PRIME
from jit.loops_compile import compiled_loop, one_compiles, put_compiled
from protocol.arrays import Int32, Int64

SOURCES = (__file__, arithmetic_model.__file__)

Work = NewType("Work", Int32)
"""[NUM_LINES, B] the lines below, with an entry per sequence of a batch."""
Seeds = NewType("Seeds", Int64)
"""[B] 0 without a temperature."""
Newest = NewType("Newest", Int32)
"""[rows] the newest token of every row."""
TokenIds = NewType("TokenIds", Int32)
BlockTables = NewType("BlockTables", Int32)
Targets = NewType("Targets", Int32)
"""[B, 1 + most drafts]"""

ROW, NUM_COMPUTED, NUM_SCHEDULED, NUM_DRAFTS = range(4)
PENDING = 4
"""1: its one token is in `Newest` alone."""
SAMPLED = 5
BASE = 6
"""Index in the whole answer less position."""
NUM_LINES = 7


@compiled_loop(SOURCES)
def write(cache: Int64, work: Work, newest: Newest, token_ids: TokenIds, tables: BlockTables) -> None:
    """Puts the KV of every scheduled token into its sequence's blocks."""
    rows, num_computed, num_scheduled, pending = work[ROW], work[NUM_COMPUTED], work[NUM_SCHEDULED], work[PENDING]
    block_size = cache.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        for position in range(num_computed[i], num_computed[i] + num_scheduled[i]):
            token_id = np.int64(newest[row] if pending[i] else token_ids[row, position])
            cache[tables[row, position // block_size], position % block_size] = (token_id + 1) * (position + 1)


@compiled_loop(SOURCES)
def sample(
    cache: Int64,
    work: Work,
    seeds: Seeds,
    newest: Newest,
    token_ids: TokenIds,
    tables: BlockTables,
    vocab_size: int,
    targets: Targets,
    counts: Int32,
) -> None:
    """What the model says after the known tokens of each sampled sequence, from the cache, and after each draft that it
    would have said itself. Writes `targets`, `counts` [B] (how many of them; 0 where nothing is sampled) and
    `newest`.
    """
    rows, num_drafts, sampled, bases = work[ROW], work[NUM_DRAFTS], work[SAMPLED], work[BASE]
    block_size = cache.shape[1]
    for i in range(len(rows)):
        row, total, counts[i] = rows[i], np.int64(0), 0
        if not sampled[i]:
            continue
        num_known = work[NUM_COMPUTED, i] + work[NUM_SCHEDULED, i] - num_drafts[i]
        for start in range(0, num_known, block_size):
            for offset in range(min(block_size, num_known - start)):
                total += cache[tables[row, start // block_size], offset]
        for position in range(num_known, num_known + num_drafts[i] + 1):
            noise = seeds[i] * (bases[i] + position + 1) % PRIME
            newest[row] = (total % PRIME + noise) % PRIME * MULTIPLIER % PRIME % vocab_size
            targets[i, counts[i]] = newest[row]
            counts[i] += 1
            if counts[i] > num_drafts[i] or token_ids[row, position] != newest[row]:
                break
            total += cache[tables[row, position // block_size], position % block_size]


@cache
def compile_all() -> None:
    """Calls every loop once, with nothing to do: for a cache that is contiguous, and for one that is not."""
    line, plane = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    work, seeds, newest = Work(np.zeros((NUM_LINES, 0), np.int32)), Seeds(np.zeros(0, np.int64)), Newest(line)
    token_ids, tables = TokenIds(plane), BlockTables(plane)
    caches = np.zeros((2, 2), np.int64), np.zeros((2, 2, 2), np.int64)[:, :, 0]
    put_compiled(globals())
    with one_compiles(SOURCES):
        for cache in caches:
            write(cache, work, newest, token_ids, tables)
            sample(cache, work, seeds, newest, token_ids, tables, 1, Targets(plane), line)
