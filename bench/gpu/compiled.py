"""What the GPU's compiler made of the kernels that this process has launched."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting

REGISTERS = 1 << 16
"""Of a multiprocessor (CUDA C++ programming guide, all compute capabilities from 5.0 on)."""
RESERVED_BYTES = 1024
"""Shared memory that each block takes beside its own (CUDA C++ programming guide, compute capabilities from 8.0 on)."""
REGISTERS_AT_ONCE = 256
"""A warp's registers are allocated in pieces of so many (CUDA occupancy calculator)."""
MAX_BLOCKS = 32


class Multiprocessor(NamedTuple):
    registers: int
    shared_bytes: int
    warps: int

    def programs(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many programs of a kernel are resident at once: `registers` of a thread, `shared_bytes` and warps of a
        program.
        """
        per_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        return min(
            self.registers // (per_warp * num_warps),
            self.shared_bytes // (shared_bytes + RESERVED_BYTES),
            self.warps // num_warps,
            MAX_BLOCKS,
        )


def variants(setting: Setting) -> Iterator[Item]:
    """Yields one table of all variants. In a rehearsal it has no rows, because nothing is compiled."""
    rows: list[tuple[Cell, ...]] = []
    if not setting.rehearsal:
        card = torch.cuda.get_device_properties(0)
        multiprocessor = Multiprocessor(
            REGISTERS,
            card.shared_memory_per_multiprocessor,
            card.max_threads_per_multi_processor // 32,
        )
        rows = sorted(row_of(kernel, multiprocessor) for kernel in launched())
    columns = (
        Column("kernel"),
        Column("constants"),
        Column("warps"),
        Column("registers"),
        Column("spilled"),
        Column("shared", "bytes"),
        Column("resident", "programs per SM"),
        Column("occupancy", "%"),
    )
    yield Table("kernels as they were compiled", columns, rows)
    yield Note("spilled: words of a thread that its registers do not hold; occupancy: resident warps of those possible")


def row_of(kernel: Any, multiprocessor: Multiprocessor) -> tuple[Cell, ...]:
    """Of a kernel that Triton has compiled and loaded."""
    num_warps, shared_bytes = kernel.metadata.num_warps, kernel.metadata.shared
    names = kernel.src.fn.arg_names
    constants = " ".join(f"{names[path[0]]}={value}" for path, value in sorted(kernel.src.constants.items()))
    programs = multiprocessor.programs(kernel.n_regs, shared_bytes, num_warps)
    occupancy = 100 * programs * num_warps / multiprocessor.warps
    return kernel.name, constants, num_warps, kernel.n_regs, kernel.n_spills, shared_bytes, programs, occupancy


def launched() -> list[Any]:
    """Triton's `CompiledKernel` of each variant of our kernels that was launched on any device."""
    kernels: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("engine.kernels."):
            for value in vars(module).values():
                caches = getattr(value, "device_caches", None)  # a `JITFunction`'s: (kernels by key, ...) by device
                for by_key, *_ in caches.values() if isinstance(caches, dict) else ():
                    kernels |= {id(kernel): kernel for kernel in by_key.values() if kernel.module is not None}
    return list(kernels.values())
