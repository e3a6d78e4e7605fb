"""Compiled kernels on disk: found again under their key, told apart by it; whatever is wrong with the cache, the
kernels are right.
"""

import errno
import logging
import os
import pwd
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.models.loading import build_model
from engine.runners import cpu_attention, cpu_simd
from engine.runners.cpu_simd import Kind, make_widen_row
from engine.runners.torch_cpu import TorchCPURunner
from jit import kernel_cache
from jit.kernel_cache import KernelCache, compiled, compiled_loop, folder_of, one_compiles
from tests.engine.tiny_llama import TINY, random_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore::numba.NumbaPerformanceWarning"
)  # a kernel of one row has nothing to do in parallel


SOURCES = (__file__, cpu_simd.__file__)


def make_widen(num: int, kind: Kind, key: str) -> Any:
    """A kernel that closes over an emitter, as attention does: element by element float32 of one row."""
    piece = make_widen_row(num, kind)

    def widen(row: Any, out: Any) -> None:
        piece(row.ctypes.data, out.ctypes.data)

    return compiled(SOURCES, key)(widen)


def test_found_again_under_its_key_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    row = (np.arange(32, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for key, num, hits in (("16", 16, 0), ("16", 16, 1), ("32", 32, 0), ("32", 32, 1)):
        widen, out = make_widen(num, "bf16", key), np.zeros(32, dtype=np.float32)
        with one_compiles(SOURCES):
            widen(row, out)
        assert sum(widen.stats.cache_hits.values()) == hits
        assert out.tolist() == [*range(num), *[0] * (32 - num)]
    assert list(tmp_path.glob("kernels/*/*.nbc"))


def test_loops_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    numbers = np.zeros(3, np.int32)
    for hits in (0, 1):

        def count(numbers: Any) -> None:
            for i in range(len(numbers)):
                numbers[i] += i

        loop: Any = compiled_loop(SOURCES)(count)
        loop(numbers)
        assert sum(loop.stats.cache_hits.values()) == hits
    assert numbers.tolist() == [0, 2, 4]


LOOP = """
from jit.kernel_cache import compiled_loop


@compiled_loop((__file__,))
def count(numbers):
    for i in range(len(numbers)):
        numbers[i] += i
"""


def test_a_file_that_moves_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code names the module that it came from: another checkout, where the file is still in its old place, cannot
    load that.
    """
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for room in ("old_room", "new_room"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "moved.py").write_text(LOOP)
        loop, numbers = import_module(f"{room}.moved").count, np.zeros(3, np.int32)
        loop(numbers)
        assert (hits(loop), numbers.tolist()) == (0, [0, 1, 2])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What this process has said about its cache, as if it had just started."""
    monkeypatch.setattr(kernel_cache, "_told", Event())
    caplog.set_level(logging.INFO, logger=kernel_cache.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == kernel_cache.__name__]


def count_up() -> tuple[Any, list[int]]:
    """A loop compiled anew or found, and what it makes of three zeros."""

    def count(numbers: Any) -> None:
        for i in range(len(numbers)):
            numbers[i] += i

    loop, numbers = compiled_loop(SOURCES)(count), np.zeros(3, np.int32)
    with one_compiles(SOURCES):
        loop(numbers)
    return loop, numbers.tolist()


def hits(loop: Any) -> int:
    return sum(loop.stats.cache_hits.values())


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def one_bit_flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: file.write_bytes(b""),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "truncated in its digest": lambda file: os.truncate(file, 7),
    "one bit": one_bit_flipped,
    "garbage": lambda file: file.write_bytes(b"\x80\x04garbage" * 999),
    "another's": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "a folder": replaced_by_a_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]], damage: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    count_up()
    (file,) = tmp_path.glob("kernels/*/*.nbc")
    assert told() == []
    damage(file)
    loop, numbers = count_up()
    assert (hits(loop), numbers) == (0, [0, 1, 2])
    assert len(told()) == 1 and str(file.parent) in told()[0] and "compiled in memory" in told()[0]
    if file.is_file():
        assert hits(count_up()[0]) == 1, "and the file is good again"


def test_a_full_disk_keeps_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    for _ in range(2):
        assert count_up()[1] == [0, 1, 2]
    assert len(told()) == 1 and "cannot be written: No space left on device" in told()[0]
    assert [path.name for path in tmp_path.glob("kernels/*/*")] == ["lock"]


def test_a_file_where_the_folder_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "file"))
    widen, out = make_widen(16, "f32", ""), np.zeros(16, dtype=np.float32)
    with one_compiles(SOURCES):
        widen(np.arange(16, dtype=np.float32), out)
    assert out.tolist() == list(range(16))
    assert len(told()) == 1


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]) -> None:
    def getpwuid(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("TWOPASS_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    for _ in range(2):
        assert count_up()[1] == [0, 1, 2]
    assert len(told()) == 1 and "TWOPASS_CACHE can name a folder" in told()[0]


def test_every_kind_of_cpu_has_code_of_its_own(tmp_path: Path) -> None:
    class Codegen:
        def __init__(self, *made_for: str) -> None:
            self.magic_tuple = lambda: made_for

    cache = KernelCache(count_up, "", tmp_path)
    kinds = [("x86_64", "znver5", "+avx512f"), ("x86_64", "haswell", "+avx512f"), ("x86_64", "haswell", "")]
    assert len({cache._path("(int32)", Codegen(*kind)) for kind in kinds}) == 3


def test_symbols_of_attention_carry_its_shape() -> None:
    """Else a process that loads two shapes which two others compiled may run one for the other."""
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    TorchCPURunner(model, torch.zeros(2 * 2 * 2 * 2 * 16 * 64 * 4, dtype=torch.uint8), block_size=16, num_threads=1)
    files = list(folder_of(cpu_attention.SOURCES).glob("*.attention_64_3_16_64_f32*.nbc"))
    assert files
    for file in files:
        names = set(re.findall(rb"_make_\w+?12_3clocals_3e\d+(\w+?)B\d+v", file.read_bytes()))
        assert len(names) > 3 and all(name.endswith(b"_64_3_16_64_f32") for name in names)
