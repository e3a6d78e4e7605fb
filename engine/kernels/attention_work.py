"""The work lists of attention: which program of a launch takes which queries over which keys. numpy only, vectorised
over the batch.

A launch has a fixed number of programs for each KV head, and the list is the same for all heads. Tiles of queries lie
end to end on a line. Each is as long as the keys that it sees, in tiles of keys, and `ITEM_TILES` more. Equal pieces of
the line go to the programs, so a long tile is cut between several of them, and each of those writes a part that a merge
adds up. The idea is that of Osama et al., "Stream-K" (2023). A program has at most two parts, so the workspace depends
on the grid and not on the batch. The same batch is always cut in the same way, padded or not.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32, Int64

Int = npt.NDArray[np.integer[Any]]

ITEM_FIELDS = 5
"""Sequence, first query, first key, end key, part; -1 for the part: all keys are here, the result is final."""
MERGE_FIELDS = 4
"""Sequence, first query, first part, number of parts; 0 for the number: there is nothing to merge."""
ITEM_TILES = 1
"""What an item costs before its first keys arrive, in tiles of keys: it waits for a few loads one after another, which
is about what a program takes to read a tile of keys while all others read.
"""
SLACK = 32
"""Cuts are spared where that moves less than this part of a program's share."""
MIN_KEYS = 256
"""Keys from which another program is worth its start and the merge."""


class Grid(NamedTuple):
    """What the host knows of a launch: queries of a tile, keys of a tile, programs of one KV head."""

    queries: int
    block_kv: int
    num_programs: int

    @property
    def max_parts(self) -> int:
        """Parts that all lists for this grid may have: each cut ends one part and begins another."""
        return 2 * (self.num_programs - 1)


class Work(NamedTuple):
    """One launch's list, int32 [list_size(num_programs, number of items)]: where each program's items begin and, last,
    where they end [num_programs + 1]; merges [num_programs, MERGE_FIELDS], the first `num_merges` of which are used;
    items [any number, ITEM_FIELDS].
    """

    grid: Grid
    array: Int32
    num_merges: int


def list_size(grid: Grid, num_items: int) -> int:
    """Elements of a list. A batch of T tiles has at most T + grid.num_programs - 1 items."""
    return 1 + (1 + MERGE_FIELDS) * grid.num_programs + ITEM_FIELDS * num_items


def idle(grid: Grid) -> Work:
    """No items: the launch computes nothing."""
    return Work(grid, np.zeros(list_size(grid, 0), np.int32), 0)


def attention_work(grids: Sequence[Grid], starts: Int, contexts: Int, window: int = 0) -> list[Work]:
    """The launches that a batch needs, at most one per grid.

    grids     with ascending `queries`. A sequence goes to the first whose tile holds all its queries, else it is
              divided into tiles of the last.
    starts    [B + 1]: sequence b owns the tokens [starts[b], starts[b + 1])
    contexts  [B]: tokens of the sequence in the cache, this step's included; 0: a padding row, which has no items
    window    keys that a query sees; 0: all up to its own
    """
    queries = np.where(contexts > 0, np.diff(starts), 0)
    works, below = [], 0
    for grid in grids:
        inside = queries > below
        if grid is not grids[-1]:
            inside &= queries <= grid.queries
        sequences = np.flatnonzero(inside)
        if len(sequences):
            works.append(_cut(grid, sequences, queries[sequences], contexts[sequences], window))
        below = grid.queries
    return works


def _cut(grid: Grid, sequences: Int64, queries: Int, contexts: Int, window: int) -> Work:
    """The list of one launch for S sequences with at least one query each. See `attention_work`."""
    if queries.max() > grid.queries:
        num_tiles = -(-queries // grid.queries)
        index = np.repeat(np.arange(len(sequences)), num_tiles)
        first = (np.arange(len(index)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * grid.queries
        sequences, queries, contexts = sequences[index], queries[index], contexts[index]
    else:
        first = np.zeros(len(sequences), np.int64)
    before = contexts - queries + first
    end_key = np.minimum(before + grid.queries, contexts)
    begin_key = np.maximum(before + 1 - window, 0) if window else np.zeros_like(end_key)
    num_key_tiles = (end_key - begin_key + grid.block_kv - 1) // grid.block_kv
    bounds, cuts, begins = _boundaries(grid, num_key_tiles)
    is_cut = cuts > 0
    cut_items, num_items = begins[is_cut], len(first) + np.count_nonzero(is_cut)
    array = np.zeros(list_size(grid, num_items), np.int32)
    runs, merges, items = views(grid, array)
    runs[1 : 1 + len(begins)], runs[1 + len(begins) :] = begins, num_items
    goes_on = np.zeros(num_items, np.bool_)
    goes_on[cut_items] = True
    tile = np.arange(num_items) - np.cumsum(goes_on)
    for field, value in enumerate((sequences, first, begin_key, end_key)):
        items[:, field] = value[tile]
    items[:, 4] = -1
    if not len(cut_items):
        return Work(grid, array, 0)
    ended = cut_items - 1
    items[cut_items, 2] = items[ended, 3] = begin_key[bounds[is_cut]] + cuts[is_cut] * grid.block_kv
    firsts = ended[~goes_on[ended]]
    goes_on[ended] = True
    parts = np.flatnonzero(goes_on)
    items[parts, 4] = np.arange(len(parts))
    used = merges[: len(firsts)]
    used[:, :2] = items[firsts, :2]
    used[:, 2] = items[firsts, 4]
    used[:, 3] = np.diff(used[:, 2], append=len(parts))
    return Work(grid, array, len(firsts))


def _boundaries(grid: Grid, num_key_tiles: Int64) -> tuple[Int64, Int64, Int64]:
    """Where programs 1, 2, ... begin: in which tile of queries, behind how many of its tiles of keys, and with which
    item. A boundary close to an edge of a tile moves there, which saves a cut and costs little balance. Programs
    without a boundary stay idle.
    """
    ends = np.cumsum(num_key_tiles + ITEM_TILES)
    total = int(ends[-1])
    num = min(grid.num_programs, max(len(ends), total * grid.block_kv // MIN_KEYS))
    at = np.arange(1, num) * total // num
    slack = max(1, total // num // SLACK)
    tiles = np.searchsorted(ends, at, side="right")
    left = ends[tiles] - at
    cuts = num_key_tiles[tiles] - left
    cuts[(cuts <= slack) | (left <= slack)] = 0
    tiles += left <= slack
    real = cuts > 0
    return tiles, cuts, tiles + np.cumsum(real)


def views(grid: Grid, array: Int32) -> tuple[Int32, Int32, Int32]:
    """Runs, merges and items of a list."""
    merges = 1 + grid.num_programs
    items = merges + MERGE_FIELDS * grid.num_programs
    return (
        array[:merges],
        array[merges:items].reshape(-1, MERGE_FIELDS),
        array[items:].reshape(-1, ITEM_FIELDS),
    )


def program_loads(work: Work) -> Int64:
    """[num_programs] what each program of a KV head has to do: queries times keys in whole tiles, the starts of its
    items included.
    """
    runs, _, items = views(work.grid, work.array)
    tiles = ITEM_TILES + (items[:, 3] - items[:, 2] + work.grid.block_kv - 1) // work.grid.block_kv
    sums = np.concatenate(([0], np.cumsum(tiles.astype(np.int64))))
    return (sums[runs[1:]] - sums[runs[:-1]]) * work.grid.queries * work.grid.block_kv


def load_balance(works: Iterable[Work]) -> float:
    """The longest program's work over the mean, of launches one after another; 1: all end at once."""
    loads = [program_loads(work) for work in works]
    return sum(int(each.max()) for each in loads) / sum(float(each.mean()) for each in loads)
