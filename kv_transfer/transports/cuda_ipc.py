"""Transport between two GPUs of one node: the decode engine maps the prefill engine's cache and its copy engines fetch
blocks.

 1. The prefill engine keeps its cache in a `DevicePool` and puts the pool's handle into its endpoint. Lease words lie
    in host memory, in a shared segment, as they do for engines on the CPU.
 2. The decode engine opens the handle and copies the nonce behind the cache: proof that bytes really come from there to
    here.
 3. A pull is cut into pieces, and a piece is one call: a batch of copies, one for each run of neighbouring blocks (or
    for each block, if only a span of it is moved), on a stream of its own, so that the SMs stay with decode. Where
    copies are small a kernel gathers them instead. Its last event reached, the lease word is read, in host memory.

The exporter may die at any moment. What a driver then does with mapped memory is not relied on: the pull ends with
bytes or with an error, and the lease word decides whether bytes count.
"""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from kv_transfer.block_span import BlockSpan, copies_of
from kv_transfer.device.device import Device, KVCache, MemoryKind
from kv_transfer.device.device_pool import DeviceStream
from kv_transfer.endpoint import Offer, single
from kv_transfer.lease import read_word
from kv_transfer.segment import NONCE_BYTES, SharedSegment
from kv_transfer.transport import Endpoint, ExportedCache, Notify
from kv_transfer.transports.peers import PullTransport
from kv_transfer.transports.pull_thread import Pull
from protocol.arrays import Int64
from protocol.errors import PullFailed

logger = logging.getLogger(__name__)

KIND = "cuda_ipc"
MEMORY: tuple[MemoryKind, ...] = ("GPU",)
PIECE_BYTES = 64 << 20
"""Bytes whose copy is started between two looks at `cancel`. Two pieces are under way at once, so that looking costs no
time: that holds as long as a piece takes longer than a look (POLL_S and what waking up takes), and at 450 GB/s, the
most that NVLink gives an H100 in one direction, this one takes 0.15 ms. Larger ones would save nothing, since a piece
is one call, and would make a cancelled pull end later.
"""
GATHER_BELOW_BYTES = 64 << 10
"""Where the copies of a piece have fewer bytes than this on average, starting one takes longer than the copy, and one
kernel moves all of them. A batch takes away the call and not what a copy engine needs for each copy; how long that
takes is not measured yet.
"""


def export(exported: ExportedCache, resources: ExitStack) -> Endpoint:
    """Says what a decode engine needs to map the pool and the segment's lease words. Raises PullFailed where memory
    cannot be shared.
    """
    cache, segment, device = exported.cache, exported.segment, exported.cache.require_device()
    return single(
        KIND,
        num_blocks=cache.num_blocks,
        block_bytes=cache.block_bytes,
        handle=device.share(cache.pointer).hex(),
        bus_id=device.bus_id,
        path=str(segment.path),
        nonce=segment.nonce.hex(),
    )


def import_into(cache: KVCache, notify: Notify) -> PullTransport:
    """`cache.gather` moves small runs; without one, every run is a copy."""
    return PullTransport(KIND, cache, notify, partial(_open, cache))


class MappedPool:
    """A peer's mapped pool and its lease words, with a stream of its own: peers do not wait for each other."""

    def __init__(self, stream: DeviceStream, words: SharedSegment, pool: KVCache, cache: KVCache) -> None:
        """`stream` has two events; `pool` is copied from, `cache` into."""
        self._stream, self._segment, self._pool, self._cache = stream, words, pool, cache

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def copy(self, pull: Pull) -> str:
        try:
            return self._issue_pieces(pull)
        finally:
            self._stream.drain()  # terminal only when nothing writes any more, also after an error half way

    def read_word(self, index: int) -> int:
        return read_word(self._segment.words, index)

    def _issue_pieces(self, pull: Pull) -> str:
        piece = max(1, PIECE_BYTES // pull.span.length)
        for number, begin in enumerate(range(0, len(pull.dst_blocks), piece)):
            if number >= 2:
                self._stream.wait(number % 2)
            if pull.cancelled.is_set():
                return "cancelled"
            blocks = slice(begin, begin + piece)
            self._issue(pull.src_blocks[blocks], pull.dst_blocks[blocks], pull.span)
            self._stream.record(number % 2)
        return ""

    def _issue(self, src: Int64, dst: Int64, span: BlockSpan) -> None:
        pool, cache = self._pool, self._cache
        there, here, sizes = copies_of(src, dst, span, pool.block_bytes, cache.block_bytes).T
        if cache.gather is not None and len(src) * span.length < GATHER_BELOW_BYTES * len(sizes):
            src_part = pool.tensor[:, span.src_offset : span.src_offset + span.length]
            dst_part = cache.tensor[:, span.dst_offset : span.dst_offset + span.length]
            self._stream.gather(cache.gather, src_part, src, dst_part, dst)
            return
        self._stream.copy_many(cache.pointer + here, pool.pointer + there, sizes)


def _open(cache: KVCache, offer: Offer, resources: ExitStack) -> MappedPool:
    device, nonce = cache.require_device(), bytes.fromhex(offer["nonce"])
    words = SharedSegment.open(Path(offer["path"]), nonce)
    resources.callback(words.close)
    pointer = device.open(bytes.fromhex(offer["handle"]))
    resources.callback(_unmap, device, pointer)
    stream = resources.enter_context(DeviceStream(device, num_events=2))
    num_blocks, block_bytes = offer["num_blocks"], offer["block_bytes"]
    if stream.read(pointer + num_blocks * block_bytes, NONCE_BYTES) != nonce:
        raise PullFailed(f"the memory of GPU {offer['bus_id']} that was mapped is not the one that was offered")
    tensor = device.tensor(pointer, num_blocks, block_bytes)
    return MappedPool(stream, words, KVCache(pointer, num_blocks, block_bytes, tensor, device), cache)


def _unmap(device: Device, pointer: int) -> None:
    """The peer may be dead: what cannot be unmapped any more harms nobody."""
    try:
        device.close(pointer)
    except PullFailed as error:
        logger.warning("a peer's cache could not be unmapped: %s", error)
