"""Kernel modules where they cannot run: each in a process of its own, since this one has Triton and interprets."""

import os
import subprocess
import sys
from pathlib import Path

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


def run(program: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
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
