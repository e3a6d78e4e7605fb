"""Transport between two processes of one host: the decode engine copies blocks out of the prefill engine's shared
memory.

 1. The prefill engine keeps its cache in a `SharedSegment` and says in its endpoint where it lies and which nonce is in
    it.
 2. The decode engine opens that file; the nonce proves that both mean the same memory, and not just the same path.
 3. Pulls run one after the other in a thread of their own, in pieces, so that they can be cancelled.

The exporter may die at any moment: what is mapped stays.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kv_transfer.block_ids import checked_pairs
from kv_transfer.endpoint import offer_of, single
from kv_transfer.lease import read_word
from kv_transfer.segment import SharedSegment
from kv_transfer.transport import Blocks, Endpoint
from kv_transfer.transports.copy_blocks import copy_blocks
from kv_transfer.transports.pull_thread import Pull, PullThread

KIND = "shared_memory"
PIECE_BYTES = 16 << 20
"""Copied between two looks at `cancel`; about 1 ms."""


def export(segment: SharedSegment) -> Endpoint:
    """What a decode engine needs to open the segment."""
    num_blocks, block_bytes = segment.cache.shape
    return single(
        KIND, num_blocks=num_blocks, block_bytes=block_bytes, path=str(segment.path), nonce=segment.nonce.hex()
    )


class SharedMemoryPeer:
    """A mapped segment. Its pulls share their transport's thread with those of all other peers: one core's copy fills
    the memory bus.
    """

    def __init__(self, segment: SharedSegment, cache: Blocks, thread: PullThread) -> None:
        self._segment, self._cache, self._thread = segment, cache, thread

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Pull:
        pull = Pull(*checked_pairs(src_blocks, len(self._segment.cache), dst_blocks, len(self._cache)), self._copy)
        self._thread.start(pull)
        return pull

    def read_word(self, slot: int) -> int:
        return read_word(self._segment.words, slot)

    def close(self) -> None:
        self._segment.close()

    def _copy(self, pull: Pull) -> str:
        source = self._segment.cache
        piece = max(1, PIECE_BYTES // source.shape[1])
        for begin in range(0, len(pull.dst_blocks), piece):
            if pull.cancelled.is_set():
                return "cancelled"
            blocks = slice(begin, begin + piece)
            copy_blocks(self._cache, source, pull.dst_blocks[blocks], pull.src_blocks[blocks])
        return ""


class SharedMemoryTransport:
    """Pulls into `cache`, uint8 [num_blocks, block_bytes]. `notify` is called from the copying thread whenever a pull
    is terminal.
    """

    name = KIND

    def __init__(self, cache: Blocks, notify: Callable[[], None]) -> None:
        self._cache = cache
        nothing = np.zeros(0, np.int64)
        copy_blocks(cache, _read_only(cache), nothing, nothing)
        self._thread = PullThread(notify)

    def connect(self, endpoint: Endpoint) -> SharedMemoryPeer:
        offer = offer_of(endpoint, KIND, self._cache.shape[1])
        return SharedMemoryPeer(
            SharedSegment.open(Path(offer["path"]), bytes.fromhex(offer["nonce"])), self._cache, self._thread
        )

    def close(self) -> None:
        """Fails what is queued and ends the thread."""
        self._thread.close()


def _read_only(blocks: Blocks) -> Blocks:
    """As a peer's blocks will be, so that the copy is compiled for them."""
    view = blocks[:]
    view.flags.writeable = False
    return view
