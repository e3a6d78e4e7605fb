"""Where a KV cache lies, and one GPU as transfers see it: what they need of a driver, and no more. `CudaDevice` is the
real one, `FakeDevice` stands for one where there is none.

Pointers, streams and events are integers. Everything may be called from any thread. What fails raises PullFailed with
the driver's text, unless another error is named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kv_transfer.layout import Blocks
from protocol.arrays import Int64

MemoryKind = Literal["host", "GPU"]
"""The kinds of memory that a KV cache may lie in."""

Tensor = Any
"""uint8 [num_blocks, block_bytes] in GPU memory, torch's on a real device. Transfers pass it on, or a view of the same
columns of all blocks, and do not read it.
"""

Gather = Callable[[Tensor, Any, Tensor, Any], None]
"""A kernel that copies blocks, or the same columns of each: (source, source ids, destination, destination ids). The ids
are int64 [n] in GPU memory; source and destination are equally wide, and rows may lie further apart than that.
"""


class Device(Protocol):
    ordinal: int
    """The device's number in this process."""
    bus_id: str
    """The PCI bus id is the same in every process, whatever devices a process is shown."""

    def bind(self) -> None:
        """Makes the device current in the calling thread, for a library that calls the driver by itself there."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """The memory is outside torch's caching allocator, so that it can be shared whole. Raises CapacityError."""
        ...

    def free(self, pointer: int) -> None: ...

    def share(self, pointer: int) -> bytes:
        """Returns 64 bytes with which another process can `open` an allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation. The process that owns it is refused."""
        ...

    def close(self, pointer: int) -> None:
        """Unmaps what `open` mapped."""
        ...

    def reaches(self, bus_id: str) -> bool | None:
        """Says whether this GPU can read that one's memory directly; None when that one is not visible here."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Makes host memory readable and writable by the copy engines at full speed."""
        ...

    def unpin(self, address: int) -> None: ...

    def create_stream(self) -> int:
        """The stream never waits for the default stream, nor that for it."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Starts a copy between any two of these: memory here, opened memory, pinned host memory."""
        ...

    def copy_many(self, dsts: Int64, srcs: Int64, sizes: Int64, stream: int) -> None:
        """Starts n copies as `copy` does, from the addresses int64 [n] to the addresses int64 [n], sizes int64 [n] in
        bytes. It is one call into the driver where that has batches. No copy may read or write what another one of them
        writes: their order is open.
        """
        ...

    def clear(self, pointer: int, num_bytes: int, stream: int) -> None:
        """Starts to fill GPU memory with zeros."""
        ...

    def gather(self, gather: Gather, src: Tensor, src_ids: Int64, dst: Tensor, dst_ids: Int64, stream: int) -> None:
        """Launches a kernel on `stream`, with the ids brought to the GPU."""
        ...

    def record(self, event: int, stream: int) -> None: ...

    def reached(self, event: int) -> bool:
        """Says whether everything before the event has ended. Raises PullFailed when some of it failed."""
        ...

    def tensor(self, pointer: int, num_blocks: int, block_bytes: int) -> Tensor:
        """Returns a view of memory that somebody else owns and that must outlive it. It may be an opened peer's."""
        ...


@dataclass(frozen=True, slots=True)
class KVCache:
    """Where a KV cache lies: `num_blocks` blocks of `block_bytes` bytes begin at `pointer`. It owns nothing."""

    pointer: int
    num_blocks: int
    block_bytes: int
    tensor: Tensor
    """uint8 [num_blocks, block_bytes]: an array of numpy in host memory, the device's tensor on a GPU."""
    device: Device | None = None
    """The GPU whose memory it is; None: host memory."""
    gather: Gather | None = None
    """The kernel that moves small pieces into it; without one, every piece is a copy."""

    @classmethod
    def in_host_memory(cls, blocks: Blocks) -> "KVCache":
        return cls(blocks.ctypes.data, blocks.shape[0], blocks.shape[1], blocks)

    @classmethod
    def on_gpu(cls, device: Device, tensor: Tensor, gather: Gather | None = None) -> "KVCache":
        """Describes all of a contiguous torch tensor, uint8 [num_blocks, block_bytes], in the memory of `device`."""
        return cls(tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor, device, gather)

    @property
    def memory(self) -> MemoryKind:
        return "host" if self.device is None else "GPU"

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def bind(self) -> None:
        """Does what `Device.bind` does; nothing where the cache lies in host memory."""
        if self.device is not None:
            self.device.bind()

    def require_device(self) -> Device:
        """For transports that read GPU memory alone. Raises ValueError where the cache lies in host memory."""
        if self.device is None:
            raise ValueError("the cache lies in host memory")
        return self.device
