"""The importing side of `host_staged`: orders bytes on a channel and copies filled buffers to the GPU, several of them
on their way.
"""

import time

import numpy as np

from kv_transfer.block_span import copies_of
from kv_transfer.device.device import KVCache
from kv_transfer.device.device_pool import POLL_S, DeviceStream
from kv_transfer.segment import NONCE_BYTES, owner_lives
from kv_transfer.transports.pull_thread import Pull
from kv_transfer.transports.staging.channel import MAX_PIECES, Channel
from protocol.arrays import Int64
from protocol.errors import PullFailed

LOOK_S = 0.1
"""Seconds between two looks whether a silent exporter is alive."""

Copies = Int64
"""int64 [n, 3]: byte offset there, byte offset here, number of bytes."""


def cut(copies: Copies, buffer_bytes: int) -> list[Copies]:
    """Cuts copies into parts of at most `buffer_bytes` bytes and MAX_PIECES copies. A copy may be cut anywhere."""
    parts: list[list[tuple[int, int, int]]] = []
    room = 0
    for src, dst, num_bytes in copies.tolist():
        done = 0
        while done < num_bytes:
            if not room or len(parts[-1]) == MAX_PIECES:
                parts.append([])
                room = buffer_bytes
            size = min(room, num_bytes - done)
            parts[-1].append((src + done, dst + done, size))
            done, room = done + size, room - size
    return [np.array(part, np.int64) for part in parts]


class StagingClient:
    """One claimed channel, which one thread at a time uses."""

    def __init__(
        self, channel: Channel, src_block_bytes: int, stream: DeviceStream, cache: KVCache, fd: int, stall_s: float
    ) -> None:
        """`stream` has an event for each buffer; `fd` is the segment's file, whose lock tells whether the exporter
        lives.
        """
        self._src_block_bytes = src_block_bytes
        self._channel, self._stream, self._cache, self._fd, self._stall_s = channel, stream, cache, fd, stall_s

    def prove(self, nonce_offset: int, nonce: bytes) -> None:
        """Moves the nonce from GPU to GPU as a pull would, into the first bytes of our block 0. Raises PullFailed."""
        part = np.array([(nonce_offset, 0, NONCE_BYTES)], np.int64)
        number = self._order(part)
        self._await(number)
        self._land(number, part)
        if self._stream.read(self._cache.pointer, NONCE_BYTES) != nonce:
            raise PullFailed("the bytes that came through the channel are not the nonce that was offered")

    def copy(self, pull: Pull) -> str:
        """Returns why not all bytes came, or nothing if they did. Raises PullFailed. Nothing writes into the cache any
        more afterwards.
        """
        sizes = (self._src_block_bytes, self._cache.block_bytes)
        parts = cut(copies_of(pull.src_blocks, pull.dst_blocks, pull.span, *sizes), self._channel.buffer_bytes)
        try:
            return self._exchange(pull, parts)
        finally:
            self._stream.drain()

    def _exchange(self, pull: Pull, parts: list[Copies]) -> str:
        """Keeps as many buffers ordered as there are. Each is ordered, then filled, then landing, while its copy to our
        GPU runs, then landed.
        """
        channel, first = self._channel, self._channel.num_ordered
        num_ordered = num_landing = num_landed = 0
        moved_at = time.monotonic()
        while num_landed < len(parts):
            if pull.cancelled.is_set():
                return "cancelled"
            seen, before = channel.fills.value, (num_ordered, num_landing, num_landed)
            while num_ordered < min(len(parts), num_landed + channel.num_buffers):
                self._order(parts[num_ordered])
                num_ordered += 1
            while num_landing < num_ordered and channel.num_filled > first + num_landing:
                self._land(first + num_landing, parts[num_landing])
                num_landing += 1
            while num_landed < num_landing and self._stream.reached((first + num_landed) % channel.num_buffers):
                num_landed += 1
            if before != (num_ordered, num_landing, num_landed):
                moved_at = time.monotonic()
            elif num_landed < num_landing:
                channel.fills.wait(seen, POLL_S)
            else:
                channel.fills.wait(seen, LOOK_S)
                self._check_exporter(moved_at)
        return ""

    def _order(self, part: Copies) -> int:
        """Returns the order's number. Waits for the answer to what an earlier pull, or an earlier peer, may have left
        in its buffer.
        """
        number = self._channel.num_ordered
        self._await(number - self._channel.num_buffers)
        self._channel.order(part[:, [0, 2]])
        return number

    def _await(self, number: int) -> None:
        """Returns when an order was answered. Raises PullFailed when the exporter does not answer it."""
        started_at = time.monotonic()
        while self._channel.num_filled <= number:
            seen = self._channel.fills.value
            if self._channel.num_filled <= number:
                self._channel.fills.wait(seen, LOOK_S)
                self._check_exporter(started_at)

    def _check_exporter(self, silent_since: float) -> None:
        if not owner_lives(self._fd):
            raise PullFailed("the exporter is gone")
        if time.monotonic() - silent_since > self._stall_s:
            raise PullFailed(f"the exporter has filled no buffer for {self._stall_s:g} s")

    def _land(self, number: int, part: Copies) -> None:
        """Starts the copies of a filled buffer to where its bytes belong."""
        if error := self._channel.error(number):
            raise PullFailed(f"the exporter: {error}")
        _, offsets, sizes = part.T
        begins = self._channel.buffer(number) + np.cumsum(sizes) - sizes
        self._stream.copy_many(self._cache.pointer + offsets, begins, sizes)
        self._stream.record(number % self._channel.num_buffers)
