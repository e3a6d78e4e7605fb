"""The importing side as far as it is the same whatever moves the bytes: peers, the threads of their pulls, closing."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

from kv_transfer.block_ids import checked_pairs
from kv_transfer.block_span import BlockSpan, checked_span
from kv_transfer.device.device import KVCache
from kv_transfer.endpoint import Offer, offer_of
from kv_transfer.transport import Endpoint, Notify
from kv_transfer.transports.pull_thread import Pull, PullThread


class Source(Protocol):
    """A peer's cache and lease words, opened."""

    @property
    def num_blocks(self) -> int: ...

    def copy(self, pull: Pull) -> str:
        """Moves the bytes of a pull, in the thread for pulls. Says why it did not move all, or raises PullFailed;
        afterwards nothing writes into the destination any more.
        """
        ...

    def read_word(self, index: int) -> int:
        """Does what `Peer.read_word` promises."""
        ...


OpenSource = Callable[[Offer, ExitStack], Source]
"""Opens what a peer offers and proves that it is the one that offered. What is to be given back goes onto the stack.
Raises PullFailed.
"""


class PullPeer:
    """One source, and the thread of its pulls."""

    def __init__(
        self, source: Source, src_block_bytes: int, cache: KVCache, thread: PullThread, resources: ExitStack
    ) -> None:
        """`close` gives `resources` back."""
        self.source, self._src_block_bytes = source, src_block_bytes
        self._cache, self._thread, self._resources = cache, thread, resources

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int], span: BlockSpan | None = None) -> Pull:
        ids = checked_pairs(src_blocks, self.source.num_blocks, dst_blocks, self._cache.num_blocks)
        pull = Pull(*ids, checked_span(span, self._src_block_bytes, self._cache.block_bytes), self.source.copy)
        self._thread.start(pull)
        return pull

    def read_word(self, index: int) -> int:
        return self.source.read_word(index)

    def close(self) -> None:
        self._resources.close()


class PullTransport:
    """Pulls into one cache from peers that `open_source` opens."""

    def __init__(
        self, kind: str, cache: KVCache, notify: Notify, open_source: OpenSource, *, one_thread: bool = False
    ) -> None:
        """With `one_thread` the pulls of all peers wait for each other; otherwise each peer has a thread."""
        self.name = kind
        self.resources = ExitStack()
        """What is given back after the last peer."""
        self._cache, self._notify, self._open_source = cache, notify, open_source
        self._thread = PullThread(notify) if one_thread else None
        self._peers: WeakSet[PullPeer] = WeakSet()
        """Peers that somebody still holds: a closed one must not keep what it had mapped."""

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> PullPeer:
        src_block_bytes = self._cache.block_bytes if src_block_bytes is None else src_block_bytes
        offer = offer_of(endpoint, self.name, src_block_bytes)
        with ExitStack() as resources:
            source = self._open_source(offer, resources)
            thread = self._thread
            if thread is None:
                thread = PullThread(self._notify)
                resources.callback(thread.close)
            peer = PullPeer(source, src_block_bytes, self._cache, thread, resources.pop_all())
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        for peer in list(self._peers):
            peer.close()
        self.resources.close()
