"""Compiles the launches of `aot_cases.py` for a GPU that need not be there, and prints one JSON list of `Compiled`
fields.

    python -m tests.engine.kernels.compile_ahead 90 80

A case calls the public function with `meta` tensors: shapes without data. A driver of ours claims the architecture, so
Triton specialises and compiles exactly what that call would launch, and launches nothing. A function that read a
tensor's data on the way would fail here.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TENSOR_CORES = re.compile(r"^\s*(wgmma\.mma_async|mma\.sync|mma\.m\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one case. `stack_bytes`: what a thread keeps in local memory, which is where registers spill to."""

    case: str
    arch: int
    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_cores: bool


@dataclass(frozen=True, slots=True)
class AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread, as the loader will read them. Local memory is counted as stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def describe(case: str, arch: int, kernel: Any) -> Compiled:
    registers, stack_bytes = resources(kernel.asm["cubin"])
    tensor_cores = TENSOR_CORES.search(kernel.asm["ptx"]) is not None
    meta = kernel.metadata
    return Compiled(case, arch, meta.name, registers, stack_bytes, meta.shared, meta.num_warps, tensor_cores)


def compile_cases(archs: list[int]) -> list[Compiled]:
    from tests.engine.kernels.aot_cases import cases_of

    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        launched.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    compiled: list[Compiled] = []
    for arch in archs:
        driver.set_active(AbsentDevice(arch))
        for case, call in cases_of(arch).items():
            launched.clear()
            call()
            compiled += [describe(case, arch, kernel) for kernel in launched]
    return compiled


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in compile_cases([int(arch) for arch in sys.argv[1:]])]))
