"""Transport between two processes of one host: the decode engine copies blocks out of the prefill engine's shared
memory.

 1. The prefill engine keeps its cache in a `SharedSegment` and says in its endpoint where it lies and which nonce is in
    it.
 2. The decode engine opens that file; the nonce proves that both mean the same memory, and not just the same path.
 3. Pulls run one after the other in a thread of their own, in pieces, so that they can be cancelled. All peers share
    it: one core's copy fills the memory bus.

The exporter may die at any moment: what is mapped stays.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from kv_transfer.block_span import BlockSpan
from kv_transfer.device.device import KVCache, MemoryKind
from kv_transfer.endpoint import Offer, single
from kv_transfer.layout import Blocks
from kv_transfer.lease import read_word
from kv_transfer.segment import SharedSegment
from kv_transfer.transport import Endpoint, ExportedCache, Notify
from kv_transfer.transports.copy_blocks import copy_blocks
from kv_transfer.transports.peers import PullTransport
from kv_transfer.transports.pull_thread import Pull

KIND = "shared_memory"
MEMORY: tuple[MemoryKind, ...] = ("host",)
PIECE_BYTES = 16 << 20
"""Bytes that are copied between two looks at `cancel`, in about 1 ms."""


def export(exported: ExportedCache, resources: ExitStack) -> Endpoint:
    """Says what a decode engine needs to open the segment."""
    cache, segment = exported.cache, exported.segment
    return single(
        KIND,
        num_blocks=cache.num_blocks,
        block_bytes=cache.block_bytes,
        path=str(segment.path),
        nonce=segment.nonce.hex(),
    )


def import_into(cache: KVCache, notify: Notify) -> PullTransport:
    blocks: Blocks = cache.tensor
    nothing = np.zeros(0, np.int64)
    whole = BlockSpan(0, 0, cache.block_bytes)
    copy_blocks(blocks, _read_only(blocks), nothing, nothing, whole)  # compiles now, so that no pull waits for that
    return PullTransport(KIND, cache, notify, partial(_open, blocks), one_thread=True)


class MappedSegment:
    """A peer's segment, mapped read-only."""

    def __init__(self, segment: SharedSegment, blocks: Blocks) -> None:
        self._segment, self._blocks = segment, blocks

    @property
    def num_blocks(self) -> int:
        """It is 0 once the segment is closed."""
        return len(self._segment.cache)

    def copy(self, pull: Pull) -> str:
        source = self._segment.cache
        piece = max(1, PIECE_BYTES // pull.span.length)
        for begin in range(0, len(pull.dst_blocks), piece):
            if pull.cancelled.is_set():
                return "cancelled"
            blocks = slice(begin, begin + piece)
            copy_blocks(self._blocks, source, pull.dst_blocks[blocks], pull.src_blocks[blocks], pull.span)
        return ""

    def read_word(self, index: int) -> int:
        return read_word(self._segment.words, index)


def _open(blocks: Blocks, offer: Offer, resources: ExitStack) -> MappedSegment:
    segment = SharedSegment.open(Path(offer["path"]), bytes.fromhex(offer["nonce"]))
    resources.callback(segment.close)
    return MappedSegment(segment, blocks)


def _read_only(blocks: Blocks) -> Blocks:
    """A peer's blocks will be read-only, and the copy is to be compiled for them."""
    view = blocks[:]
    view.flags.writeable = False
    return view
