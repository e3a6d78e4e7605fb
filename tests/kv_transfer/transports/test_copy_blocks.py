"""The compiled copy, what becomes of damaged machine code, and the copy where nothing compiles."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.transports import copy_blocks as module

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("block_bytes", [8, 12])
def test_rows_go_where_they_are_sent_and_nowhere_else(block_bytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (6, block_bytes), np.uint8)
    destination = np.zeros((5, block_bytes), np.uint8)
    module.copy_blocks(destination, source, np.array([4, 1, 2]), np.array([0, 5, 5]))
    assert np.array_equal(destination, np.stack([0 * source[0], source[5], source[5], 0 * source[0], source[0]]))


COPY_ONE = """
import numpy as np
from kv_transfer.transports.copy_blocks import copy_blocks
destination, source = np.zeros((2, 4), np.uint8), np.ones((1, 4), np.uint8)
copy_blocks(destination, source, np.array([1]), np.array([0]))
print(destination.sum(axis=1).tolist())
"""


def test_damaged_machine_code_is_compiled_again(tmp_path: Path) -> None:
    def copied() -> str:
        environment = {**os.environ, "TWOPASS_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", COPY_ONE]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert copied() == "[0, 4]\n"
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert kept, "machine code lies in the cache that the kernels have"
    for path in kept:
        path.write_bytes(path.read_bytes()[:500])
    assert copied() == "[0, 4]\n"


def test_without_a_compiler_rows_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(module, "_compiled", module._compiled.__wrapped__)
    assert module._compiled() is module._copy_whole_rows
    test_rows_go_where_they_are_sent_and_nowhere_else(8)
    test_rows_go_where_they_are_sent_and_nowhere_else(12)
