"""Transport between two GPUs without a path of their own: through pinned host memory that both processes map.

 1. The prefill engine makes a shared segment of channels (staging/channel.py), one for each peer that may come. Lease
    words lie in the engine's own segment, as they do for every transport on this host.
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
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.device.device import KVCache, MemoryKind
from kv_transfer.device.device_pool import DeviceStream
from kv_transfer.endpoint import Offer, single
from kv_transfer.lease import read_word
from kv_transfer.segment import PREFIX, SharedSegment, open_verified
from kv_transfer.transport import Endpoint, ExportedCache, Notify
from kv_transfer.transports.peers import PullTransport
from kv_transfer.transports.pull_thread import Pull
from kv_transfer.transports.staging.channel import Channel, channel_bytes
from kv_transfer.transports.staging.client import StagingClient
from kv_transfer.transports.staging.server import StagingServer
from protocol.errors import PullFailed

KIND = "host_staged"
MEMORY: tuple[MemoryKind, ...] = ("GPU",)
BUFFER_BYTES, NUM_BUFFERS = 4 << 20, 4
"""Size and number of one channel's buffers: large enough for PCIe's full speed, enough of them that neither side waits
for the other. Either side starts all copies of a buffer by one call.
"""
STALL_S = 2.0
"""A living exporter that fills nothing for so long fails the pull."""


def export(exported: ExportedCache, resources: ExitStack) -> Endpoint:
    """Makes pinned channels, and the threads that fill them. Raises PullFailed where memory cannot be pinned,
    CapacityError where there is too little shared memory.
    """
    cache, device = exported.cache, exported.cache.require_device()
    with ExitStack() as opened:
        channels = SharedSegment.create(
            f"{exported.segment.path.name.removeprefix(PREFIX)}-channels",
            block_bytes=channel_bytes(BUFFER_BYTES, NUM_BUFFERS),
            # Twice as many as peers: a restarted router makes each connect anew before it lets go of the old one.
            num_blocks=2 * exported.num_peers,
            num_words=0,
        )
        opened.callback(channels.close)
        address = channels.cache.ctypes.data
        device.pin(address, channels.cache.nbytes)
        opened.callback(device.unpin, address)
        server = StagingServer(cache, [Channel(memory, BUFFER_BYTES, NUM_BUFFERS) for memory in channels.cache])
        opened.callback(server.close)
        resources.push(opened.pop_all())
    return single(
        KIND,
        num_blocks=cache.num_blocks,
        block_bytes=cache.block_bytes,
        bus_id=device.bus_id,
        path=str(exported.segment.path),
        nonce=exported.segment.nonce.hex(),
        channels_path=str(channels.path),
        channels_nonce=channels.nonce.hex(),
        channels_offset=channels.cache_offset,
        num_channels=len(channels.cache),
        buffer_bytes=BUFFER_BYTES,
        num_buffers=NUM_BUFFERS,
    )


def import_into(cache: KVCache, notify: Notify) -> PullTransport:
    return PullTransport(KIND, cache, notify, partial(_open, cache, threading.Lock()))


class ClaimedChannel:
    """A channel of a peer and its lease words: peers do not wait for each other."""

    def __init__(self, client: StagingClient, words: SharedSegment, num_blocks: int) -> None:
        self.client, self.num_blocks = client, num_blocks
        self._segment = words

    def copy(self, pull: Pull) -> str:
        return self.client.copy(pull)

    def read_word(self, index: int) -> int:
        return read_word(self._segment.words, index)


def _open(cache: KVCache, proving: threading.Lock, offer: Offer, resources: ExitStack) -> ClaimedChannel:
    """Moves the nonce through the first bytes of our block 0, which belongs to no sequence. Peers open at once and take
    turns there.
    """
    device, nonce, num_blocks = cache.require_device(), bytes.fromhex(offer["nonce"]), offer["num_blocks"]
    block_bytes, buffer_bytes, num_buffers = offer["block_bytes"], offer["buffer_bytes"], offer["num_buffers"]
    words = SharedSegment.open(Path(offer["path"]), nonce)
    resources.callback(words.close)
    fd = open_verified(Path(offer["channels_path"]), bytes.fromhex(offer["channels_nonce"]), os.O_RDWR)
    resources.callback(os.close, fd)
    number = _claim(fd, offer["num_channels"], resources)
    memory = _map_channel(fd, offer["channels_offset"], number, channel_bytes(buffer_bytes, num_buffers))
    device.pin(memory.ctypes.data, memory.nbytes)
    resources.callback(device.unpin, memory.ctypes.data)
    stream = resources.enter_context(DeviceStream(device, num_events=num_buffers))
    client = StagingClient(Channel(memory, buffer_bytes, num_buffers), block_bytes, stream, cache, fd, STALL_S)
    with proving:
        client.prove(num_blocks * block_bytes, nonce)
    return ClaimedChannel(client, words, num_blocks)


def _claim(fd: int, num_channels: int, resources: ExitStack) -> int:
    """Takes the first channel that nobody holds. It is ours until `resources` are closed. Raises PullFailed when all
    are taken.
    """
    for number in range(num_channels):
        try:
            _lock(fd, number, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            continue
        resources.callback(_lock, fd, number, fcntl.F_UNLCK)  # closing is not enough: a mapping keeps the file open
        return number
    raise PullFailed(f"all {num_channels} channels of the exporter are taken")


def _lock(fd: int, number: int, kind: int) -> None:
    """The lock is the open file's and not the process's: two peers in one process exclude each other, too.
    `fcntl_locking(2)` describes struct flock.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))


def _map_channel(fd: int, first_offset: int, number: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The channel is writable; all other channels stay out of reach."""
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, offset=first_offset + number * num_bytes)
    return np.frombuffer(memory, np.uint8)
