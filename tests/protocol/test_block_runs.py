"""Neighbouring blocks become one piece, in whatever order they are named."""

import numpy as np
import pytest

from protocol.block_runs import merged_runs


@pytest.mark.parametrize(
    ("src", "dst", "runs"),
    [
        ([], [], []),
        ([3], [5], [[3, 5, 1]]),
        ([1, 2, 3], [4, 5, 6], [[1, 4, 3]]),
        ([1, 2, 3], [4, 5, 7], [[1, 4, 2], [3, 7, 1]]),
        ([1, 2, 4], [4, 5, 6], [[1, 4, 2], [4, 6, 1]]),
        ([3, 2, 1], [1, 2, 3], [[1, 3, 1], [2, 2, 1], [3, 1, 1]]),
        ([3, 2, 1, 9], [6, 5, 4, 0], [[1, 4, 3], [9, 0, 1]]),
        ([7, 7], [1, 2], [[7, 1, 1], [7, 2, 1]]),
    ],
)
def test_neighbours_on_both_sides_make_a_run(src: list[int], dst: list[int], runs: list[list[int]]) -> None:
    assert merged_runs(np.array(src, np.int64), np.array(dst, np.int64)).tolist() == runs


def test_runs_cover_every_pair_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        src, dst = rng.integers(0, 6, 20), rng.integers(0, 6, 20)
        runs = merged_runs(src, dst)
        pairs = [(s + i, d + i) for s, d, n in runs.tolist() for i in range(n)]
        assert sorted(pairs) == sorted(zip(src.tolist(), dst.tolist(), strict=True))
