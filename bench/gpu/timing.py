"""Measures times, and the floors to compare them with: the card's fastest copies and matmuls, measured the same way.

On a GPU a time is the median of the times between two CUDA events. Before each call 512 MB are overwritten, so that no
input is in the L2 cache and the host is ahead of the device when the call begins. A rehearsal calls once.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from bench.gpu.setting import Setting

FLUSH_BYTES = 512 << 20
NUM_WARMUPS = 3


class Stopwatch:
    def __init__(self, setting: Setting) -> None:
        self._rehearsal = setting.rehearsal
        self._flush = torch.empty(setting.size(FLUSH_BYTES, 1), dtype=torch.uint8, device=setting.device)

    def device_s(
        self, call: Callable[[], object], num: int = 20, prepare: Callable[[], object] = lambda: None
    ) -> float:
        """Seconds that the device takes for what `call` launches, the median of `num` calls. `prepare` runs before each
        of them and is not timed.
        """
        prepare()
        if self._rehearsal:
            return _wall_s(call)
        for _ in range(NUM_WARMUPS):
            call()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num)]
        for begin, end in pairs:
            prepare()
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        seconds: float = median(begin.elapsed_time(end) for begin, end in pairs) / 1000
        return seconds

    def wall_s(self, call: Callable[[], object], num: int = 20) -> float:
        """Seconds that a `call` which waits for the device takes, the median of `num` calls."""
        if self._rehearsal:
            return _wall_s(call)
        for _ in range(NUM_WARMUPS):
            call()
        return median(_wall_s(call) for _ in range(num))


def _wall_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Floors(NamedTuple):
    copy_bytes_s: float
    """Bytes read plus bytes written per second by a copy from device to device."""
    to_device_bytes_s: float
    """Bytes per second from pinned host memory to the device."""
    to_host_bytes_s: float
    """Bytes per second from the device to pinned host memory."""
    matmul_flops: float
    """Operations per second of a matmul in the model's dtype. A multiplication and its addition are two."""

    def least_s(self, num_bytes: float, flops: float = 0.0) -> float:
        """The least seconds of a kernel that moves `num_bytes` and computes `flops` on tensor cores."""
        return max(num_bytes / self.copy_bytes_s, flops / self.matmul_flops)


def measure_floors(setting: Setting, watch: Stopwatch) -> Floors:
    num_bytes, width = setting.size(2 << 30, 1 << 10), setting.size(8192, 16)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    copy_s = watch.device_s(lambda: target.copy_(source))
    host = torch.zeros(num_bytes // 4, dtype=torch.uint8, pin_memory=not setting.rehearsal)
    part = target[: len(host)]
    to_device_s = watch.device_s(lambda: part.copy_(host, non_blocking=True), num=5)
    to_host_s = watch.device_s(lambda: host.copy_(part, non_blocking=True), num=5)
    a, b = (torch.randn(width, width, device=setting.device, dtype=setting.model_dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul_s = watch.device_s(lambda: torch.mm(a, b, out=out), num=10)
    return Floors(2 * num_bytes / copy_s, len(host) / to_device_s, len(host) / to_host_s, 2 * width**3 / matmul_s)
