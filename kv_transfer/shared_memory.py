"""Transport between two processes of one host: the decode engine copies blocks out of the prefill engine's shared memory.

 1. The prefill engine keeps its cache in a `SharedSegment` and says in its endpoint where it lies and which nonce is in it.
 2. The decode engine opens that file; the nonce proves that both mean the same memory, and not just the same path.
 3. Pulls run one after the other in a thread of their own, in pieces, so that they can be cancelled.

The exporter may die at any moment: what is mapped stays.
"""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.copy_blocks import copy_blocks
from kv_transfer.segment import SharedSegment
from kv_transfer.transport import Blocks, Endpoint
from protocol.errors import LayoutMismatch, PullFailed

KIND = "shared_memory"
PIECE_BYTES = 16 << 20
"""Copied between two looks at `cancel`; about 1 ms."""

Int64 = npt.NDArray[np.int64]


def export(segment: SharedSegment) -> Endpoint:
    """What a decode engine needs to open the segment."""
    num_blocks, block_bytes = segment.cache.shape
    return json.dumps(
        {"kind": KIND, "path": str(segment.path), "nonce": segment.nonce.hex(), "block_bytes": block_bytes, "num_blocks": num_blocks}
    ).encode()


class SharedMemoryPull:
    """One pull: queued, copying, terminal."""

    def __init__(self, source: Blocks, src_blocks: Int64, dst_blocks: Int64) -> None:
        self.source, self.src_blocks, self.dst_blocks = source, src_blocks, dst_blocks
        self.cancelled = threading.Event()
        self.done = False
        self.error = ""

    def poll(self) -> bool:
        return self.done

    def cancel(self) -> None:
        self.cancelled.set()


class SharedMemoryPeer:
    """A mapped segment. Its pulls share their transport's thread with those of all other peers."""

    def __init__(self, segment: SharedSegment, start: Callable[[SharedMemoryPull], None], num_blocks: int) -> None:
        self._segment, self._start, self._num_blocks = segment, start, num_blocks
        self._fence = threading.Lock()

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> SharedMemoryPull:
        source = self._segment.cache
        pull = SharedMemoryPull(source, _checked(src_blocks, len(source), "there"), _checked(dst_blocks, self._num_blocks, "here"))
        if len(pull.src_blocks) != len(pull.dst_blocks):
            raise PullFailed(f"{len(src_blocks)} blocks there for {len(dst_blocks)} here")
        self._start(pull)
        return pull

    def read_word(self, slot: int) -> int:
        with self._fence:
            pass
        return int(self._segment.words[slot])

    def close(self) -> None:
        self._segment.close()


class SharedMemoryTransport:
    """Pulls into `cache`, uint8 [num_blocks, block_bytes]. `notify` is called from the copying thread whenever a pull is terminal."""

    name = KIND

    def __init__(self, cache: Blocks, notify: Callable[[], None]) -> None:
        self._cache, self._notify = cache, notify
        self._queue: queue.SimpleQueue[SharedMemoryPull | None] = queue.SimpleQueue()
        self._closed = False
        nothing = np.zeros(0, np.int64)
        copy_blocks(cache, _read_only(cache), nothing, nothing)
        self._thread = threading.Thread(target=self._work, name="pull", daemon=True)
        self._thread.start()

    def connect(self, endpoint: Endpoint) -> SharedMemoryPeer:
        try:
            where = json.loads(endpoint)
            kind, path, nonce, block_bytes = where["kind"], Path(where["path"]), bytes.fromhex(where["nonce"]), where["block_bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise PullFailed(f"endpoint {endpoint[:80]!r} is not one of shared memory") from error
        if kind != KIND:
            raise PullFailed(f"endpoint speaks {kind}, not {KIND}")
        if block_bytes != self._cache.shape[1]:
            raise LayoutMismatch(f"blocks there have {block_bytes} bytes, here {self._cache.shape[1]}")
        return SharedMemoryPeer(SharedSegment.open(path, nonce), self._start, len(self._cache))

    def close(self) -> None:
        """Fails what is queued and ends the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _start(self, pull: SharedMemoryPull) -> None:
        if self._closed:
            raise PullFailed("the transport is closed")
        self._queue.put(pull)

    def _work(self) -> None:
        while (pull := self._queue.get()) is not None:
            pull.error = self._copy(pull)
            pull.done = True
            self._notify()

    def _copy(self, pull: SharedMemoryPull) -> str:
        """Why not all bytes were copied; empty if they were."""
        piece = max(1, PIECE_BYTES // self._cache.shape[1])
        for begin in range(0, len(pull.dst_blocks), piece):
            if pull.cancelled.is_set() or self._closed:
                return "cancelled"
            blocks = slice(begin, begin + piece)
            copy_blocks(self._cache, pull.source, pull.dst_blocks[blocks], pull.src_blocks[blocks])
        return ""


def _read_only(blocks: Blocks) -> Blocks:
    """As a peer's blocks will be, so that the copy is compiled for them."""
    view = blocks[:]
    view.flags.writeable = False
    return view


def _checked(blocks: Sequence[int], num_blocks: int, where: str) -> Int64:
    ids = np.asarray(blocks, np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
        raise PullFailed(f"block {ids.max() if ids.min() >= 0 else ids.min()} {where} is outside 0 .. {num_blocks - 1}")
    return ids
