"""Transport between two GPUs without a path of their own: through pinned host memory that both processes map.

 1. The prefill engine makes a shared segment: lease words, and one channel (channel.py) for each peer that may come.
 2. A decode engine claims a channel with a lock on one byte of the file; the kernel takes that back when the process
    ends.
 3. It orders its pull in buffers' worths. The prefill engine's thread copies them from its GPU into the channel's
    buffers, the decode engine's thread from there to its own GPU: two streams, both at work on different buffers.
 4. Copied, a buffer is ordered anew. After the last one the lease word is read, in host memory.

The exporter may die at any moment: the lock that it holds on its file tells, and one that lives and does nothing is
given STALL_S.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kv_transfer.block_ids import checked_pairs
from kv_transfer.device.device import Device, DeviceBlocks
from kv_transfer.device.device_pool import DevicePool, DeviceStream
from kv_transfer.endpoint import offer_of, single
from kv_transfer.lease import read_word
from kv_transfer.segment import SharedSegment, open_verified
from kv_transfer.transport import Endpoint
from kv_transfer.transports.pull_thread import Pull, PullThread
from kv_transfer.transports.staging.channel import Channel, channel_bytes
from kv_transfer.transports.staging.client import StagingClient
from kv_transfer.transports.staging.server import StagingServer
from protocol.errors import PullFailed

KIND = "host_staged"
BUFFER_BYTES, NUM_BUFFERS = 4 << 20, 4
"""Of one channel: large enough for PCIe's full speed, enough of them that neither side waits for the other."""
STALL_S = 2.0
"""A living exporter that fills nothing for so long fails the pull."""


class StagedExport:
    """What the prefill side holds: pinned channels and the threads that fill them."""

    def __init__(
        self, device: Device, pool: DevicePool, segment: SharedSegment, buffer_bytes: int, num_buffers: int
    ) -> None:
        """`segment`: its cache is the channels, [number of channels, `channel_bytes`]. Raises PullFailed where memory
        cannot be pinned.
        """
        self._segment = segment
        with ExitStack() as resources:
            address = segment.cache.ctypes.data
            device.pin(address, segment.cache.nbytes)
            resources.callback(device.unpin, address)
            server = StagingServer(
                device, pool, [Channel(memory, buffer_bytes, num_buffers) for memory in segment.cache]
            )
            resources.callback(server.close)
            self._resources = resources.pop_all()
        self.endpoint = single(
            KIND,
            num_blocks=pool.blocks.num_blocks,
            block_bytes=pool.blocks.block_bytes,
            bus_id=device.bus_id,
            path=str(segment.path),
            nonce=segment.nonce.hex(),
            num_channels=len(segment.cache),
            buffer_bytes=buffer_bytes,
            num_buffers=num_buffers,
        )

    def close(self) -> None:
        self._resources.close()


class HostStagedPeer:
    """A claimed channel, with a thread for its pulls: peers do not wait for each other."""

    def __init__(
        self,
        client: StagingClient,
        segment: SharedSegment,
        num_blocks: int,
        cache: DeviceBlocks,
        notify: Callable[[], None],
        resources: ExitStack,
    ) -> None:
        """`resources`: what `close` gives back."""
        self._client, self._segment, self._num_blocks, self._cache, self._resources = (
            client,
            segment,
            num_blocks,
            cache,
            resources,
        )
        self._thread = PullThread(notify)

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Pull:
        pull = Pull(*checked_pairs(src_blocks, self._num_blocks, dst_blocks, self._cache.num_blocks), self._client.copy)
        self._thread.start(pull)
        return pull

    def read_word(self, slot: int) -> int:
        return read_word(self._segment.words, slot)

    def close(self) -> None:
        self._thread.close()
        self._resources.close()


class HostStagedTransport:
    """Pulls into `cache`. `notify` is called from other threads. `stall_s`: how long a living exporter may be silent in
    a pull.
    """

    name = KIND

    def __init__(
        self, device: Device, cache: DeviceBlocks, notify: Callable[[], None], stall_s: float = STALL_S
    ) -> None:
        self._device, self._cache, self._notify, self._stall_s = device, cache, notify, stall_s
        self._peers: WeakSet[HostStagedPeer] = WeakSet()
        """Those somebody still holds: a closed one must not keep what it had mapped."""

    def connect(self, endpoint: Endpoint) -> HostStagedPeer:
        """Moves the nonce through the first bytes of our block 0, which belongs to no sequence."""
        offer = offer_of(endpoint, KIND, self._cache.block_bytes)
        path, nonce, buffer_bytes, num_buffers = (
            Path(offer["path"]),
            bytes.fromhex(offer["nonce"]),
            offer["buffer_bytes"],
            offer["num_buffers"],
        )
        with ExitStack() as resources:
            segment = SharedSegment.open(path, nonce)
            resources.callback(segment.close)
            fd = open_verified(path, nonce, os.O_RDWR)
            resources.callback(os.close, fd)
            number = _claim(fd, offer["num_channels"], resources)
            memory = _map_channel(fd, segment.cache_offset, number, channel_bytes(buffer_bytes, num_buffers))
            self._device.pin(memory.ctypes.data, memory.nbytes)
            resources.callback(self._device.unpin, memory.ctypes.data)
            stream = resources.enter_context(DeviceStream(self._device, num_events=num_buffers))
            client = StagingClient(Channel(memory, buffer_bytes, num_buffers), stream, self._cache, fd, self._stall_s)
            client.prove(offer["num_blocks"] * self._cache.block_bytes, nonce)
            peer = HostStagedPeer(client, segment, offer["num_blocks"], self._cache, self._notify, resources.pop_all())
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close()


def _claim(fd: int, num_channels: int, resources: ExitStack) -> int:
    """The first channel that nobody holds; ours until `resources` are closed. Raises PullFailed when all are taken."""
    for number in range(num_channels):
        try:
            _lock(fd, number, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            continue
        resources.callback(_lock, fd, number, fcntl.F_UNLCK)  # closing is not enough: a mapping keeps the file open
        return number
    raise PullFailed(f"all {num_channels} channels of the exporter are taken")


def _lock(fd: int, number: int, kind: int) -> None:
    """Of the open file, not of the process: two peers in one process exclude each other, too. fcntl_locking(2), struct
    flock.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))


def _map_channel(fd: int, first_offset: int, number: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Writable; the rest of the segment, lease words included, stays out of reach."""
    memory = mmap.mmap(
        fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=first_offset + number * num_bytes
    )
    return np.frombuffer(memory, np.uint8)
