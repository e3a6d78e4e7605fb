"""A GPU of make-believe, for tests and for machines without one: its memory is POSIX shared memory, so two processes
really map it.

Work on a stream runs when somebody asks for an event behind it. A test may stall the device after any number of copies,
or let a call fail.
"""

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from kv_transfer.device.device import Gather, Tensor
from kv_transfer.segment import DIRECTORY, NONCE_BYTES, PREFIX, SharedSegment
from protocol.arrays import Int64
from protocol.errors import CapacityError, PullFailed

HANDLE_BYTES = 64


class Marker:
    """An event's place in a stream."""

    def __init__(self, event: int) -> None:
        self.event = event


class FakeMemory:
    """The memory of one GPU, `capacity` bytes, for all who stand for its processes in one test. As on a GPU, memory
    that its owner has freed, or has died with, stays taken as long as a peer maps it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holders: dict[Path, tuple[int, int]] = {}
        """Bytes of each allocation, and how many own or map it."""
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        with self._lock:
            return self._num_free()

    def _num_free(self) -> int:
        return self.capacity - sum(num_bytes for num_bytes, _ in self._holders.values())

    def take(self, path: Path, num_bytes: int) -> None:
        """Raises CapacityError where there is too little."""
        with self._lock:
            if num_bytes > self._num_free():
                raise CapacityError(f"out of memory: {num_bytes} bytes are asked for, {self._num_free()} free")
            self._holders[path] = (num_bytes, 1)

    def hold(self, path: Path) -> None:
        with self._lock:
            num_bytes, holders = self._holders[path]
            self._holders[path] = (num_bytes, holders + 1)

    def let_go(self, path: Path) -> None:
        with self._lock:
            num_bytes, holders = self._holders.pop(path)
            if holders > 1:
                self._holders[path] = (num_bytes, holders - 1)


class FakeDevice:
    """`name` begins the names of its memory's files and is unique on the machine. `peers` are the bus ids that it
    reaches; another one's memory cannot be opened. `memory` None: there is always enough. `pid` is that of the process
    that this object stands for; no process opens memory of its own. `has_batches`: as with a driver that starts many
    copies by one call.
    """

    def __init__(
        self,
        name: str,
        bus_id: str = "fake:0",
        peers: frozenset[str] = frozenset({"fake:0"}),
        *,
        memory: FakeMemory | None = None,
        pid: int | None = None,
        has_batches: bool = True,
    ) -> None:
        self.ordinal = 0
        self.bus_id = bus_id
        self._memory = memory
        self._pid = os.getpid() if pid is None else pid
        self.stalled = threading.Event()
        """It is set once work was asked for and not done."""
        self.failures: dict[str, str | Exception] = {}
        """What a call fails with from now on, by the name of the call (`copy`, `reached`, `open`, ...): the driver's
        text, or an exception that is not ours.
        """
        self.num_copies = 0
        self.num_copy_calls = 0
        """Calls into the driver by which copies were started."""
        self.num_gathers = 0
        self.pinned: dict[int, int] = {}
        self._name, self._peers, self._has_batches = name, peers, has_batches
        self._num_copies_left: int | None = None
        self._lock = threading.Lock()
        self._bound = threading.local()
        self._numbers = count(1)
        self._owned: dict[int, SharedSegment] = {}
        self._opened: dict[int, tuple[SharedSegment, int]] = {}
        self._streams: dict[int, deque[Callable[[], None] | Marker]] = {}
        """Work that is not done yet, in order."""
        self._recorded: dict[int, tuple[int, Marker]] = {}
        """Stream and marker of each event's last record, until that is reached."""

    def stall_after(self, num_copies: int) -> None:
        """So many more copies run, then no work at all."""
        with self._lock:
            self._num_copies_left = num_copies
            self.stalled.clear()

    def resume(self) -> None:
        with self._lock:
            self._num_copies_left = None

    def bind(self) -> None:
        self._bound.done = True

    @property
    def is_bound(self) -> bool:
        """Whether it is current in the calling thread, as a library must find it that calls a driver by itself."""
        return getattr(self._bound, "done", False)

    def allocate(self, num_bytes: int) -> int:
        segment = SharedSegment.create(
            f"{self._name}-{next(self._numbers)}", block_bytes=num_bytes, num_blocks=1, num_words=1
        )
        if self._memory is not None:
            try:
                self._memory.take(segment.path, num_bytes)
            except CapacityError:
                segment.close()
                raise
        self._owned[segment.cache.ctypes.data] = segment
        return segment.cache.ctypes.data

    def free(self, pointer: int) -> None:
        segment = self._owned.pop(pointer)
        if self._memory is not None:
            self._memory.let_go(segment.path)
        segment.close()

    def share(self, pointer: int) -> bytes:
        self._fail("share")
        segment = self._owned[pointer]
        name = f"{self._pid} {self.bus_id} {segment.path.name.removeprefix(PREFIX)}".encode()
        return (segment.nonce + name).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        self._fail("open")
        pid, bus_id, name = handle[NONCE_BYTES:].rstrip(b"\0").decode().split(" ")
        if int(pid) == self._pid:
            raise PullFailed("open: invalid device context (201)")
        if bus_id not in self._peers:
            raise PullFailed("open: peer access is not supported between these two devices (217)")
        path = DIRECTORY / f"{PREFIX}{name}"
        with self._lock:
            for pointer, (segment, times) in self._opened.items():
                if segment.path == path and segment.nonce == handle[:NONCE_BYTES]:
                    self._opened[pointer] = (segment, times + 1)
                    return pointer
            segment = SharedSegment.open(path, handle[:NONCE_BYTES])
            if self._memory is not None:
                self._memory.hold(segment.path)
            self._opened[segment.cache.ctypes.data] = (segment, 1)
            return segment.cache.ctypes.data

    def close(self, pointer: int) -> None:
        self._fail("close")
        with self._lock:
            segment, times = self._opened.pop(pointer)
            if times > 1:
                self._opened[pointer] = (segment, times - 1)
            else:
                self._unmap(segment)

    def _unmap(self, segment: SharedSegment) -> None:
        if self._memory is not None:
            self._memory.let_go(segment.path)
        segment.close()

    @property
    def num_opened(self) -> int:
        """Allocations of others that are mapped now."""
        return len(self._opened)

    def reaches(self, bus_id: str) -> bool | None:
        return bus_id in self._peers

    def pin(self, address: int, num_bytes: int) -> None:
        self._fail("pin")
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def create_stream(self) -> int:
        with self._lock:
            stream = next(self._numbers)
            self._streams[stream] = deque()
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            del self._streams[stream]

    def create_event(self) -> int:
        return next(self._numbers)

    def destroy_event(self, event: int) -> None:
        self._recorded.pop(event, None)

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self._fail("copy")
        with self._lock:
            self._streams[stream].append(functools.partial(_move, dst, src, num_bytes))
            self.num_copies += 1
            self.num_copy_calls += 1

    def copy_many(self, dsts: Int64, srcs: Int64, sizes: Int64, stream: int) -> None:
        """A batch may stall half way, as one on a GPU may be half done."""
        num_calls = self.num_copy_calls
        for dst, src, num_bytes in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
            self.copy(dst, src, num_bytes, stream)
        if self._has_batches and len(sizes):
            self.num_copy_calls = num_calls + 1

    def clear(self, pointer: int, num_bytes: int, stream: int) -> None:
        with self._lock:
            self._streams[stream].append(functools.partial(_fill, pointer, num_bytes))

    def gather(self, gather: Gather, src: Tensor, src_ids: Int64, dst: Tensor, dst_ids: Int64, stream: int) -> None:
        self._fail("gather")
        with self._lock:
            self._streams[stream].append(functools.partial(gather, src, src_ids, dst, dst_ids))
            self.num_gathers += 1

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            marker = Marker(event)
            self._streams[stream].append(marker)
            self._recorded[event] = (stream, marker)

    def reached(self, event: int) -> bool:
        self._fail("reached")
        with self._lock:
            while event in self._recorded:
                work = self._streams[self._recorded[event][0]]
                if isinstance(first := work[0], Marker):
                    if self._recorded.get(first.event, (0, None))[1] is first:
                        del self._recorded[first.event]
                elif self._num_copies_left == 0:
                    self.stalled.set()
                    return False
                else:
                    first()
                    if self._num_copies_left is not None:
                        self._num_copies_left -= 1
                work.popleft()
            return True

    def tensor(self, pointer: int, num_blocks: int, block_bytes: int) -> Tensor:
        """It is an array of numpy, so that nothing here needs torch."""
        memory = (ctypes.c_ubyte * (num_blocks * block_bytes)).from_address(pointer)
        return np.ctypeslib.as_array(memory).reshape(num_blocks, block_bytes)

    def _fail(self, call: str) -> None:
        failure = self.failures.get(call)
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            raise PullFailed(f"{call}: {failure}")


def _move(dst: int, src: int, num_bytes: int) -> None:
    ctypes.memmove(dst, src, num_bytes)


def _fill(pointer: int, num_bytes: int) -> None:
    ctypes.memset(pointer, 0, num_bytes)
