"""Host memory for swapped blocks, pinned so that a GPU's copy engines reach it at full speed, without the host's help.

It is mapped anonymously and then registered with CUDA, because torch's own pinned memory comes in powers of two: 40 GiB
would take 64.
"""

import logging
import mmap
from typing import Protocol

import torch

from protocol.errors import CapacityError

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process


class Registrar(Protocol):
    """Pins host memory for a GPU."""

    def register(self, address: int, num_bytes: int) -> None:
        """Raises RuntimeError with the driver's text."""
        ...

    def unregister(self, address: int) -> None:
        """Waits for the copies under way first."""
        ...


class CudaRegistrar:
    """The one of torch's CUDA runtime."""

    def register(self, address: int, num_bytes: int) -> None:
        _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        try:
            torch.cuda.synchronize()
            _check(torch.cuda.cudart().cudaHostUnregister(address))
        except RuntimeError as error:  # a lost device; its process ends, and the memory with it
            log.warning("swap space stays pinned: %s", error)


class SwapSpace:
    """Owns the memory of host blocks."""

    def __init__(self, num_blocks: int, block_bytes: int, registrar: Registrar | None) -> None:
        """`registrar` None means plain memory, for a cache on the CPU. Raises CapacityError where so much memory cannot
        be had or pinned.
        """
        self._registrar: Registrar | None = None
        if registrar is None or not num_blocks:
            self.blocks = torch.empty((num_blocks, block_bytes), dtype=torch.uint8)
            """uint8 [num_blocks, block_bytes], none of them after `close`."""
            return
        num_bytes = num_blocks * block_bytes
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # After a fork that copied these pages, this process would write to copies of them, and the GPU to the old.
            memory.madvise(mmap.MADV_DONTFORK)
            blocks = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)
            registrar.register(blocks.data_ptr(), num_bytes)
        except (OSError, RuntimeError) as error:
            raise CapacityError(
                f"swap_space_bytes: {num_bytes} bytes of host memory for {num_blocks} swapped blocks cannot be pinned: "
                f"{error}; lower it (or num_host_blocks), or give this engine more memory and let it lock as much "
                "(`ulimit -l`)"
            ) from error
        self.blocks, self._registrar = blocks, registrar

    def close(self) -> None:
        """Gives the memory back. The second time nothing happens."""
        if self._registrar is not None:
            self._registrar.unregister(self.blocks.data_ptr())
            self._registrar = None
        self.blocks = self.blocks.new_empty((0, self.blocks.shape[1]))  # the last reference unmaps it


def _check(result: object) -> None:
    """`result` is a cudaError_t."""
    if int(result):  # type: ignore[call-overload]
        raise RuntimeError(f"{torch.cuda.cudart().cudaGetErrorString(result)} ({int(result)})")  # type: ignore[call-overload]
