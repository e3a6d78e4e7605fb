"""A step of the arithmetic model as plain loops, compiled like those of the scheduler."""

from functools import cache

import numpy as np

from engine.loops_compile import compiled_loop, one_compiles, put_compiled
from engine.runners import arithmetic_model
from engine.runners.arithmetic_model import MULTIPLIER, PRIME
from protocol.arrays import Bool, Int32, Int64

SOURCES = (__file__, arithmetic_model.__file__)


@compiled_loop(SOURCES)
def write(
    cache: Int64, rows: Int32, num_computed: Int32, num_scheduled: Int32, pending: Bool, last: Int32, token_ids: Int32, tables: Int32
) -> None:
    """Puts the KV of every scheduled token into its sequence's blocks; a pending one is its row's in `last`."""
    block_size = cache.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        for position in range(num_computed[i], num_computed[i] + num_scheduled[i]):
            token_id = np.int64(last[row] if pending[i] else token_ids[row, position])
            cache[tables[row, position // block_size], position % block_size] = (token_id + 1) * (position + 1)


@compiled_loop(SOURCES)
def sample(
    cache: Int64,
    rows: Int32,
    num_known: Int32,
    num_drafts: Int32,
    sampled: Bool,
    seeds: Int64,
    bases: Int32,
    last: Int32,
    token_ids: Int32,
    tables: Int32,
    vocab_size: int,
    targets: Int32,
    counts: Int32,
) -> None:
    """What the model says after the `num_known` tokens of each sampled sequence, from the cache, and after each draft that it would
    have said itself. Writes `targets` [B, 1 + most drafts], `counts` [B] (how many of them; 0 where nothing is sampled) and `last`."""
    block_size = cache.shape[1]
    for i in range(len(rows)):
        row, total, counts[i] = rows[i], np.int64(0), 0
        if not sampled[i]:
            continue
        for start in range(0, num_known[i], block_size):
            for offset in range(min(block_size, num_known[i] - start)):
                total += cache[tables[row, start // block_size], offset]
        for position in range(num_known[i], num_known[i] + num_drafts[i] + 1):
            noise = seeds[i] * (bases[i] + position + 1) % PRIME
            last[row] = (total % PRIME + noise) % PRIME * MULTIPLIER % PRIME % vocab_size
            targets[i, counts[i]] = last[row]
            counts[i] += 1
            if counts[i] > num_drafts[i] or token_ids[row, position] != last[row]:
                break
            total += cache[tables[row, position // block_size], position % block_size]


@cache
def compile_all() -> None:
    """Calls every loop once, with nothing to do: for a cache that is contiguous, and for one that is not."""
    line, plane, flags, seeds = np.zeros(0, np.int32), np.zeros((0, 0), np.int32), np.zeros(0, np.bool_), np.zeros(0, np.int64)
    caches = np.zeros((2, 2), np.int64), np.zeros((2, 2, 2), np.int64)[:, :, 0]
    put_compiled(globals())
    with one_compiles(SOURCES):
        for cache in caches:
            write(cache, line, line, line, flags, line, plane, plane)
            sample(cache, line, line, line, flags, seeds, line, line, plane, plane, 1, plane, line)
