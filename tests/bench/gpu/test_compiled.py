"""Tests what is told of compiled kernels."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.gpu.compiled import Multiprocessor, launched, row_of

H100 = Multiprocessor(registers=1 << 16, shared_bytes=228 << 10, warps=64)


@pytest.mark.parametrize(
    ("registers", "shared_kib", "num_warps", "programs"),
    [
        (32, 0, 4, 16),  # all 64 warps
        (128, 0, 4, 4),
        (255, 0, 8, 1),
        (33, 0, 4, 12),  # 40 registers are taken of each thread
        (32, 100, 4, 2),
        (16, 0, 1, 32),
    ],
)
def test_programs_are_resident_as_registers_and_memory_allow(
    registers: int, shared_kib: int, num_warps: int, programs: int
) -> None:
    assert H100.programs(registers, shared_kib << 10, num_warps) == programs


def kernel(**options: Any) -> SimpleNamespace:
    """As much of Triton's `CompiledKernel` as is read."""
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=["x", "BLOCK"]), constants={(1,): 64})
    metadata = SimpleNamespace(num_warps=4, shared=1024)
    return SimpleNamespace(
        **{"name": "k", "src": source, "metadata": metadata, "n_regs": 128, "n_spills": 3, "module": 1} | options
    )


def test_every_variant_that_was_launched_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, never_launched = kernel(), kernel(module=None)
    function = SimpleNamespace(device_caches={0: ({"a": loaded, "b": never_launched}, {}, "target")})
    for name in ("one", "another"):  # a kernel that one module has imported from the other
        module = ModuleType(name)
        module.k = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"engine.kernels.{name}", module)
    assert launched() == [loaded]
    assert row_of(loaded, H100) == ("k", "BLOCK=64", 4, 128, 3, 1024, 4, 25.0)
