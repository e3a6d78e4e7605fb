"""Reports the card, the versions, and the floors: the fastest copies and matmuls of this machine."""

import os
import platform
import subprocess
from collections.abc import Iterator

import torch

from bench.gpu.report import Cell, Column, Facts, Item, Note, Table
from bench.gpu.setting import Setting
from bench.gpu.timing import Stopwatch, measure_floors
from engine.kernels.launch import TRITON_VERSION


def run(setting: Setting) -> Iterator[Item]:
    yield Facts(_versions() | ({"card": None, "driver": None} if setting.rehearsal else _card()))
    floors = measure_floors(setting, Stopwatch(setting))
    columns = (Column("what"), Column("rate", measured=True), Column("unit"))
    rows: list[tuple[Cell, ...]] = [
        ("copy, device to device, read + written", floors.copy_bytes_s / 1e9, "GB/s"),
        ("copy, pinned host to device", floors.to_device_bytes_s / 1e9, "GB/s"),
        ("copy, device to pinned host", floors.to_host_bytes_s / 1e9, "GB/s"),
        ("matmul bf16, 8192 x 8192 x 8192", floors.matmul_flops / 1e12, "TFLOP/s"),
    ]
    yield Table("floors", columns, rows)
    yield Note("median of CUDA events; copies of 2 GiB on the device, of 512 MiB to and from the host")


def _versions() -> dict[str, Cell]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": TRITON_VERSION,
        "host cores": os.cpu_count(),
    }


def _card() -> dict[str, Cell]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "driver": _driver(),
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "free memory": f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB",
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
