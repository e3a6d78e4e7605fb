"""Kernel modules where they cannot run: each in a process of its own, since this one has Triton and interprets."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels import launch

IMPORT_ALL = """
import importlib, pkgutil, sys
import torch
import engine.kernels
from protocol.errors import ConfigError
found = pkgutil.iter_modules(engine.kernels.__path__)
modules = [importlib.import_module(f"engine.kernels.{each.name}") for each in found]
from engine.kernels.launch import INTERPRETED, require_device
from engine.kernels.rms_norm import rms_norm
"""


LAUNCHES = """
import torch
from engine.kernels import sampling
from engine.kernels.rms_norm import rms_norm
def launches(device):
    def made(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device=device)
    for rows in (2, 1):
        rms_norm(made(rows, 32), made(32), 1e-5, made(rows, 32, dtype=torch.bfloat16))
    floats, ints = made(2), made(2, dtype=torch.int32)
    for longest in (16, 1):
        sampling.penalise(
            made(2, 97), made(2, 97, dtype=torch.int32), token_ids=made(2, longest, dtype=torch.int32), rows=ints,
            num_known=ints, last=ints, answer_bases=ints, repetitions=floats, presences=floats, frequencies=floats,
        )
"""


def run(program: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = inherited | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_modules_import_and_a_launch_names_the_extra() -> None:
    said = run(f"""
import sys
sys.modules["triton"] = None
{IMPORT_ALL}
row = torch.ones(1, 8)
for attempt in (require_device, lambda: rms_norm(row, row[0], 1e-5, row)):
    try:
        attempt()
    except ConfigError as error:
        print(error)
""")
    first, second = said.splitlines()
    assert first == second and "the extra `gpu`" in first and "device: cpu" in first


def test_without_a_gpu_modules_import_and_the_check_says_what_is_missing() -> None:
    said = run(f"""
{IMPORT_ALL}
print(bool(INTERPRETED))
try:
    require_device()
except ConfigError as error:
    print(error)
""")
    compiled, message = said.splitlines()
    assert compiled == "False" and "CUDA device" in message


def test_what_tests_start_does_not_interpret() -> None:
    assert "TRITON_INTERPRET" not in os.environ


def test_the_cpu_path_needs_no_kernel() -> None:
    said = run(
        'import sys; sys.modules["triton"] = None\nimport engine.runners.torch_cpu\nprint([m for m in sys.modules if '
        '"kernels." in m])'
    )
    assert said == "[]\n"


def test_an_interpreted_launch_tells_variants_apart_as_triton_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same launches, compiled for a GPU that is not there, and interpreted."""
    said = run(
        f"""
from tests.engine.kernels.compile_ahead import AbsentDevice, JITFunction, driver
{LAUNCHES}
from engine.kernels.launch import compiled
run = JITFunction.run
JITFunction.run = lambda self, *given, grid, warmup, **options: run(self, *given, grid=grid, warmup=True, **options)
driver.set_active(AbsentDevice(90))
launches("meta")
print(chr(10).join(compiled))
""",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    interpreted: list[str] = []
    monkeypatch.setattr(launch, "compiled", interpreted)
    scope: dict[str, Callable[[str], None]] = {}
    exec(LAUNCHES, scope)
    scope["launches"]("cpu")
    assert [variant.partition("]")[0] for variant in said.splitlines()] == [
        variant.partition("]")[0] for variant in interpreted
    ]
    assert [variant.partition(" ")[0] for variant in interpreted] == [
        "rms_norm_kernel",
        "count_kernel",
        "penalise_kernel",
    ]
