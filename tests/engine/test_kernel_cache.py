"""Compiled kernels on disk: found again under their key, told apart by it, and done without where nothing can be written."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.kernel_cache import _folder, compiled, compiled_loop, one_compiles
from engine.models.llama import build_model
from engine.runners import cpu_kernels
from engine.runners.cpu_simd import make_widen_row
from engine.runners.torch_cpu import TorchCPURunner
from tests.engine.tiny_llama import TINY, random_tensors

pytestmark = pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")  # a kernel of one row has nothing to do in parallel


def make_widen(num: int, bf16: bool, key: str) -> Any:
    """A kernel that closes over an emitter, as attention does: element by element float32 of one row."""
    piece = make_widen_row(num, bf16)

    def widen(row: Any, out: Any) -> None:
        piece(row.ctypes.data, out.ctypes.data)

    return compiled(widen, key)


def test_found_again_under_its_key_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    row = (np.arange(32, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for key, num, hits in (("16", 16, 0), ("16", 16, 1), ("32", 32, 0), ("32", 32, 1)):
        widen, out = make_widen(num, True, key), np.zeros(32, dtype=np.float32)
        with one_compiles(__file__):
            widen(row, out)
        assert sum(widen.stats.cache_hits.values()) == hits
        assert out.tolist() == [*range(num), *[0] * (32 - num)]
    assert list(tmp_path.glob("kernels/*/*.nbi"))


def test_loops_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    numbers = np.zeros(3, np.int32)
    for hits in (0, 1):

        def count(numbers: Any) -> None:
            for i in range(len(numbers)):
                numbers[i] += i

        loop = compiled_loop(count)
        loop(numbers)
        assert sum(loop.stats.cache_hits.values()) == hits
    assert numbers.tolist() == [0, 2, 4]


def test_compiles_in_memory_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "file"))
    widen, out = make_widen(16, False, ""), np.zeros(16, dtype=np.float32)
    with one_compiles(__file__):
        widen(np.arange(16, dtype=np.float32), out)
    assert out.tolist() == list(range(16))


def test_symbols_of_attention_carry_its_shape() -> None:
    """Else a process that loads two shapes which two others compiled may run one for the other."""
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    TorchCPURunner(model, torch.zeros(2 * 2 * 2 * 2 * 16 * 64 * 4, dtype=torch.uint8), block_size=16, num_threads=1)
    files = list(_folder(cpu_kernels.__file__).glob("*.attention_64_3_16_f32*.nbc"))
    assert files
    for file in files:
        names = set(re.findall(rb"make_attention12_3clocals_3e\d+(\w+?)B\d+v", file.read_bytes()))
        assert len(names) > 3 and all(name.endswith(b"_64_3_16_f32") for name in names)
