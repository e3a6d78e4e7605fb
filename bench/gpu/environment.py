"""Reports the card, the versions, and the floors: the fastest copies and matmuls of this machine, and how fast it pins
host memory.
"""

import mmap
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import torch

from bench.gpu.device_exports import open_device
from bench.gpu.report import Cell, Column, Facts, Item, Note, Table
from bench.gpu.setting import SHARED_MEMORY, Setting
from bench.gpu.timing import Stopwatch, measure_floors
from engine.kernels.launch import TRITON_VERSION


def run(setting: Setting) -> Iterator[Item]:
    yield Facts(_versions() | ({"card": None, "driver": None} if setting.rehearsal else _card()))
    floors = measure_floors(setting, Stopwatch(setting))
    pinned_bytes_s = _pinned_bytes_s(setting)
    columns = (Column("what"), Column("rate", measured=True), Column("unit"))
    rows: list[tuple[Cell, ...]] = [
        ("copy, device to device, read + written", floors.copy_bytes_s / 1e9, "GB/s"),
        ("copy, pinned host to device", floors.to_device_bytes_s / 1e9, "GB/s"),
        ("copy, device to pinned host", floors.to_host_bytes_s / 1e9, "GB/s"),
        ("pinning host memory whose pages exist", pinned_bytes_s / 1e9, "GB/s"),
        ("matmul bf16, 8192 x 8192 x 8192", floors.matmul_flops / 1e12, "TFLOP/s"),
    ]
    yield Table("floors", columns, rows)
    yield Note("median of CUDA events; copies of 2 GiB on the device, of 512 MiB to and from the host")


def _pinned_bytes_s(setting: Setting) -> float:
    """Bytes per second that the driver makes readable by copy engines, as an engine does at its start."""
    num_bytes = setting.size(4 << 30, 1 << 12)
    memory = np.frombuffer(
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE), np.uint8
    )
    device = open_device(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}")
    started = time.perf_counter()
    device.pin(memory.ctypes.data, num_bytes)
    seconds = time.perf_counter() - started
    device.unpin(memory.ctypes.data)
    return num_bytes / seconds


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
