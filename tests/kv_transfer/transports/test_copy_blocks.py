"""The compiled copy, what becomes of damaged machine code, and the copy where nothing compiles."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jit import loops_compile
from kv_transfer.block_span import BlockSpan
from kv_transfer.transports import copy_blocks as module

ROOT = Path(__file__).parents[3]


SPANS = [(8, 8, BlockSpan(0, 0, 8)), (12, 12, BlockSpan(0, 0, 12)), (32, 16, BlockSpan(24, 8, 8))]
SPANS += [(32, 16, BlockSpan(7, 3, 11)), (32, 17, BlockSpan(24, 8, 8)), (31, 16, BlockSpan(16, 0, 8))]


@pytest.mark.parametrize(("src_bytes", "dst_bytes", "span"), SPANS)
def test_rows_go_where_they_are_sent_and_nowhere_else(src_bytes: int, dst_bytes: int, span: BlockSpan) -> None:
    source = np.random.default_rng(0).integers(0, 256, (6, src_bytes), np.uint8)
    destination, expected = np.zeros((2, 5, dst_bytes), np.uint8)
    dst, src = np.array([4, 1, 2]), np.array([0, 5, 5])
    module.copy_blocks(destination, source, dst, src, span)
    part = source[src, span.src_offset : span.src_offset + span.length]
    expected[dst, span.dst_offset : span.dst_offset + span.length] = part
    assert np.array_equal(destination, expected)


COPY_ONE = """
import numpy as np
from kv_transfer.block_span import BlockSpan
from kv_transfer.transports.copy_blocks import copy_blocks
destination, source = np.zeros((2, 4), np.uint8), np.ones((1, 4), np.uint8)
copy_blocks(destination, source, np.array([1]), np.array([0]), BlockSpan(0, 0, 4))
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
    monkeypatch.setattr(loops_compile, "_HAS_NUMBA", False)
    without = loops_compile.compiled_loop(module.SOURCES, nogil=True, uncompiled=module._by_numpy)(module._copy_rows)
    assert without is module._by_numpy
    monkeypatch.setattr(module, "_copy_rows", without)
    for src_bytes, dst_bytes, span in SPANS:
        test_rows_go_where_they_are_sent_and_nowhere_else(src_bytes, dst_bytes, span)


def test_the_copy_runs_without_the_interpreter_lock() -> None:
    pytest.importorskip("numba")
    assert module._copy_rows.compiled.targetoptions["nogil"]  # type: ignore[attr-defined]
