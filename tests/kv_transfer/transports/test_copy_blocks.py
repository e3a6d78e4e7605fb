"""The compiled copy, with and without a folder to keep machine code in, and the copy where nothing compiles."""

import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from kv_transfer.transports import copy_blocks as module


@pytest.mark.parametrize("block_bytes", [8, 12])
def test_rows_go_where_they_are_sent_and_nowhere_else(block_bytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (6, block_bytes), np.uint8)
    destination = np.zeros((5, block_bytes), np.uint8)
    module.copy_blocks(destination, source, np.array([4, 1, 2]), np.array([0, 5, 5]))
    assert np.array_equal(destination, np.stack([0 * source[0], source[5], source[5], 0 * source[0], source[0]]))


def test_without_a_writable_folder_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    njit: Callable[..., Any] = numba.njit

    def no_folder(*, nogil: bool, cache: bool = False) -> Callable[..., Any]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(nogil=nogil)  # type: ignore[no-any-return]

    monkeypatch.setattr(numba, "njit", no_folder)
    destination, source = np.zeros((2, 4), np.uint8), np.ones((1, 4), np.uint8)
    module._compile()(destination, source, np.array([1]), np.array([0]))
    assert destination.sum(axis=1).tolist() == [0, 4]


def test_without_a_compiler_rows_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(module, "_compiled", module._compile)
    assert module._compile() is module._copy_whole_rows
    test_rows_go_where_they_are_sent_and_nowhere_else(8)
    test_rows_go_where_they_are_sent_and_nowhere_else(12)
