"""A KV cache in GPU memory that other processes may read, and a stream of one's own to copy with."""

import ctypes
import time
from collections.abc import Callable
from types import TracebackType

from kv_transfer.device.device import Device, Gather, KVCache, Tensor
from kv_transfer.segment import NONCE_BYTES
from protocol.arrays import Int64
from protocol.errors import PullFailed

POLL_S = 50e-6
"""Seconds between two questions to the driver whether an event was reached. Transfers wait beside the engine, never in
its thread.
"""
PROOF_S = 2.0
"""A GPU that takes longer for a copy of a few bytes is taken for dead."""
GRANULE_BYTES = 2 << 20
"""CUDA shares memory in pieces of so many bytes: a smaller allocation could show a peer what else lies in its piece."""

_abandoned: list[object] = []
"""Host memory that a GPU which did not answer in time may still write to."""


class DeviceStream:
    """A side stream with numbered events, used by one thread at a time."""

    def __init__(self, device: Device, num_events: int = 0) -> None:
        self._device = device
        self._stream = device.create_stream()
        self._events = [device.create_event() for _ in range(num_events + 1)]
        """The last one is `drain`'s."""

    def __enter__(self) -> "DeviceStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        self._device.copy(dst, src, num_bytes, self._stream)

    def copy_many(self, dsts: Int64, srcs: Int64, sizes: Int64) -> None:
        self._device.copy_many(dsts, srcs, sizes, self._stream)

    def clear(self, pointer: int, num_bytes: int) -> None:
        self._device.clear(pointer, num_bytes, self._stream)

    def gather(self, gather: Gather, src: Tensor, src_ids: Int64, dst: Tensor, dst_ids: Int64) -> None:
        self._device.gather(gather, src, src_ids, dst, dst_ids, self._stream)

    def record(self, event: int) -> None:
        self._device.record(self._events[event], self._stream)

    def reached(self, event: int) -> bool:
        return self._device.reached(self._events[event])

    def wait(self, event: int, timeout_s: float | None = None) -> None:
        """Returns when all that was started before the event has ended. Raises PullFailed when it failed, or after
        `timeout_s`.
        """
        started_at = time.monotonic()
        while not self.reached(event):
            if timeout_s is not None and time.monotonic() - started_at > timeout_s:
                raise PullFailed(f"the GPU {self._device.bus_id} did not end a copy within {timeout_s:g} s")
            time.sleep(POLL_S)

    def drain(self, timeout_s: float | None = None) -> None:
        """Returns when everything started on this stream has ended."""
        self.record(-1)
        self.wait(-1, timeout_s)

    def read(self, pointer: int, num_bytes: int) -> bytes:
        """Reads a few bytes of GPU memory. Raises PullFailed."""
        return self._through_host(bytes(num_bytes), lambda address: self.copy(address, pointer, num_bytes))

    def write(self, pointer: int, content: bytes) -> None:
        """Writes a few bytes into GPU memory. Raises PullFailed."""
        self._through_host(content, lambda address: self.copy(pointer, address, len(content)))

    def close(self) -> None:
        for event in self._events:
            self._device.destroy_event(event)
        self._device.destroy_stream(self._stream)

    def _through_host(self, content: bytes, copy: Callable[[int], None]) -> bytes:
        buffer = ctypes.create_string_buffer(content, len(content))
        copy(ctypes.addressof(buffer))
        try:
            self.drain(PROOF_S)
        except PullFailed:
            _abandoned.append(buffer)
            raise
        return buffer.raw


class DevicePool:
    """A zeroed cache that peers may map, with a nonce behind its last block. Its owner closes it once the runner and
    every tensor of it are gone.
    """

    def __init__(self, device: Device, nonce: bytes, *, num_blocks: int, block_bytes: int) -> None:
        """Raises CapacityError, or PullFailed when the GPU does not work."""
        self._device = device
        num_bytes = num_blocks * block_bytes
        pointer = device.allocate(-(-(num_bytes + NONCE_BYTES) // GRANULE_BYTES) * GRANULE_BYTES)
        tensor = device.tensor(pointer, num_blocks, block_bytes)
        self.cache = KVCache(pointer, num_blocks, block_bytes, tensor, device)
        try:
            with DeviceStream(device) as stream:
                stream.clear(pointer, num_bytes)
                stream.write(pointer + num_bytes, nonce)
        except PullFailed:
            self.close()
            raise

    def close(self) -> None:
        self._device.free(self.cache.pointer)
