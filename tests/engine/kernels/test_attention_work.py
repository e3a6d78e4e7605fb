"""Work lists: every query meets every key that it sees exactly once, and programs have equal work."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.kernel_times import BATCHES, NUM_SMS, balance_of
from engine.kernels.attention_work import (
    Grid,
    Work,
    attention_work,
    idle,
    list_size,
    program_loads,
    views,
)
from engine.kernels.paged_attention import attention_grids

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 3000)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=20
)


def of(grids: list[Grid], sequences: list[tuple[int, int]], window: int = 0) -> list[Work]:
    """`sequences`: (queries, context) of each."""
    queries, contexts = (np.array(each) for each in zip(*sequences, strict=True))
    return attention_work(grids, np.concatenate(([0], np.cumsum(queries))), contexts, window)


@given(
    SEQUENCES,
    st.sampled_from([0, 1, 7, 64, 200, 5000]),
    st.sampled_from([4, 16, 64]),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_query_meets_its_keys_once(
    sequences: list[tuple[int, int]], window: int, block_kv: int, num_programs: int, padded: bool
) -> None:
    """And parts of one tile are numbered in a row, as its merge says."""
    grids = [Grid(queries, block_kv, num_programs) for queries in (1, 4, 16)]
    met: dict[tuple[int, int], list[tuple[int, int]]] = {}
    works = of(grids, [*sequences, (1, 0)] if padded else sequences, window)
    assert [work.grid for work in works] == sorted({work.grid for work in works})
    for work in works:
        runs, merges, items = views(work.grid, work.array)
        assert runs[0] == 0 and runs[-1] == len(items) and (np.diff(runs) >= 0).all()
        parts: dict[tuple[int, int], list[int]] = {}
        for sequence, first, begin, end, part in items.tolist():
            queries = sequences[sequence][0]
            assert 0 <= first < queries and begin < end
            if work.grid != grids[-1]:
                assert queries <= work.grid.queries
            assert work.grid == grids[0] or queries > grids[grids.index(work.grid) - 1].queries
            met.setdefault((sequence, first), []).append((begin, end))
            parts.setdefault((sequence, first), []).append(part)
        cut = {tile: numbers for tile, numbers in parts.items() if numbers != [-1]}
        assert merges[: work.num_merges].tolist() == [[*tile, each[0], len(each)] for tile, each in cut.items()]
        assert not merges[work.num_merges :].any() and work.num_merges <= num_programs - 1
        assert [number for numbers in cut.values() for number in numbers] == list(range(sum(map(len, cut.values()))))
        assert sum(map(len, cut.values())) <= work.grid.max_parts
        assert len(items) <= len(parts) + num_programs - 1
    for sequence, (queries, context) in enumerate(sequences):
        step = next((grid.queries for grid in grids if queries <= grid.queries), grids[-1].queries)
        for first in range(0, queries, step):
            ranges = met.pop((sequence, first))
            before = context - queries + first
            assert ranges[0][0] == (max(before + 1 - window, 0) if window else 0)
            assert ranges[-1][1] == min(before + step, context)
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert not met


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=256), st.integers(1, 60))
def test_no_program_has_much_more_than_its_share(contexts: list[int], num_programs: int) -> None:
    """Two of the edges that a boundary may move to, rounding, and the start of one more item."""
    grid = Grid(4, 64, num_programs)
    (work,) = of([grid], [(1, context) for context in contexts])
    loads = program_loads(work) // (grid.queries * grid.block_kv)
    share = loads.sum() / num_programs
    busy = np.count_nonzero(loads)
    if busy == num_programs and share > 32:
        assert loads.max() <= share * (1 + 2 / 32) + 4


@pytest.mark.parametrize("name", BATCHES)
def test_programs_of_an_8b_model_are_balanced(name: str) -> None:
    """Also over places where programs could run, of which a number of KV heads may leave some empty."""
    queries, contexts = BATCHES[name]
    balance = balance_of(queries, contexts, NUM_SMS)
    print(f"{name}: {balance:.3f}")
    for grid, per_sm in zip(attention_grids(32, 8, 128, torch.bfloat16, NUM_SMS), (2, 2, 1), strict=True):
        assert balance * per_sm * NUM_SMS / (8 * grid.num_programs) <= 1.15


def test_short_sequences_are_not_cut_and_have_a_program_each() -> None:
    (work,) = of([Grid(4, 64, 33)], [(1, 60)] * 8)
    assert work.num_merges == 0 and np.count_nonzero(program_loads(work)) == 8


def test_a_list_without_items() -> None:
    grid = Grid(4, 64, 5)
    work = idle(grid)
    runs, merges, items = views(grid, work.array)
    assert len(work.array) == list_size(grid, 0) and not runs.any() and not merges.any() and not len(items)
    assert of([grid], [(0, 5), (1, 0)]) == []


def test_grids_fill_every_multiprocessor() -> None:
    assert attention_grids(32, 8, 128, torch.bfloat16, 132) == (Grid(4, 64, 33), Grid(8, 64, 33), Grid(32, 64, 16))
    assert attention_grids(32, 32, 96, torch.float16, 108) == (Grid(16, 64, 6), Grid(32, 64, 6), Grid(128, 64, 3))
    assert [grid.queries for grid in attention_grids(40, 1, 128, torch.float16, 1)] == [1, 2]  # 64 rows a query
    assert all(grid.num_programs == 1 for grid in attention_grids(64, 64, 64, torch.float32, 1))
