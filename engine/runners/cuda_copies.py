"""A step's copies between host and GPU, and marks in the GPU's stream. On CPU tensors, for tests, the same at once.

Pinned memory comes from torch's host allocator, which gives a piece out again only when the copies that it was used for
have ended: steps in flight never share one.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.runner import Batch
from engine.runners.swap_space import CudaRegistrar, SwapSpace
from protocol.block_runs import merged_runs

ALIGNMENT = 16
"""Bytes. Kernels are compiled again for pointers that are aligned worse."""

TORCH_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class DeviceEvent:
    """A point in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._passed_at = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record()
        else:
            self._passed_at = time.perf_counter()

    def wait(self) -> None:
        """Sleeps until all that was launched before the mark is done. Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Of the device's time, between two marks that were waited for."""
        if self._event is None or earlier._event is None:
            return self._passed_at - earlier._passed_at
        return float(earlier._event.elapsed_time(self._event)) / 1000


def upload(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Arrays (int32, int64 or float32) as tensors on the device, all by one copy, which is not waited for. They are
    read at once.
    """
    offsets, num_bytes = [], 0
    for array in arrays.values():
        offsets.append(num_bytes)
        num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, offset in zip(arrays.values(), offsets, strict=True):
        host[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = packed.to(device, non_blocking=True)
    return {
        name: there[offset : offset + array.nbytes].view(TORCH_TYPES[array.dtype]).view(array.shape)
        for (name, array), offset in zip(arrays.items(), offsets, strict=True)
    }


def fetch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A copy on the host, complete once a mark made after it has passed."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    copied: npt.NDArray[Any] = host.numpy()
    return copied


class SwapCopies:
    """`cache`: [num_blocks, block_bytes], the runner's own; the host blocks, pinned, look the same. Touched only when a
    batch says so.

    A run of neighbours is one copy. The driver's batches of copies refuse the default stream, on which torch computes,
    and would gain little: a block of an 8B model, 2 MiB, is 40 us of PCIe 5, so that calls stay ahead of the copies.
    """

    def __init__(self, cache: torch.Tensor, num_host_blocks: int) -> None:
        """Raises CapacityError where the host blocks cannot be pinned."""
        self._cache = cache
        registrar = CudaRegistrar() if cache.device.type == "cuda" else None
        self._space = SwapSpace(num_host_blocks, cache.shape[1], registrar)

    @property
    def host(self) -> torch.Tensor:
        """uint8 [num_host_blocks, block_bytes]"""
        return self._space.blocks

    def launch(self, batch: Batch) -> int:
        """Copies out, then in, before what is launched next. Returns bytes, each counted once."""
        num_blocks = 0
        for pairs, source, destination in (
            (batch.swap_out, self._cache, self.host),
            (batch.swap_in, self.host, self._cache),
        ):
            if pairs is not None:
                num_blocks += len(pairs)
                for src, dst, length in merged_runs(*pairs.T.astype(np.int64)).tolist():
                    destination[dst : dst + length].copy_(source[src : src + length], non_blocking=True)
        return num_blocks * self._cache.shape[1]

    def close(self) -> None:
        """Waits for the copies under way, then gives the host blocks back."""
        self._space.close()
