"""The interface every transport keeps, on both sides. Block ids go in, bytes move, a word is read; no request is known
here. A file in transports/ is a `TwoSided`.

export(exported, resources) -> Endpoint     the prefill side makes its blocks and lease words readable
import_into(cache, notify) -> Transport     the decode side: what it reaches all its peers with
transport.connect(endpoint) -> Peer         opens one of them, which may take seconds
connector.connect(endpoint) -> Connection   the same beside the caller, who polls it as it polls a pull
peer.pull(src_blocks, dst_blocks, span) -> Pending
peer.read_word(index) -> int                read after the last byte of a pull has arrived
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.block_span import BlockSpan
from kv_transfer.device.device import KVCache, MemoryKind
from kv_transfer.segment import SharedSegment

Endpoint = bytes
"""It is opaque to everyone but the same transport on the other side, and travels in `Hello` and `PeerUp`."""

Notify = Callable[[], None]
"""It is called from any thread whenever a pull is terminal, or a connection."""


class Pending(Protocol):
    """One pull under way. It becomes terminal exactly once; only then may the destination blocks be freed."""

    def poll(self) -> bool:
        """True once the pull is terminal: all bytes are there, or none will come any more. It never blocks."""
        ...

    @property
    def error(self) -> str:
        """Empty when the bytes arrived, else why they did not. It means something only once the pull is terminal."""
        ...

    def cancel(self) -> None:
        """Asks the transport to fail the pull soon. The pull still becomes terminal by itself."""
        ...


class Peer(Protocol):
    """The readable side of one remote engine, in one of its epochs."""

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int], span: BlockSpan | None = None) -> Pending:
        """Starts copying `src_blocks[i]` there to `dst_blocks[i]` here: whole blocks, or a span of each. No pool uses
        spans yet. Raises PullFailed if it cannot start, LayoutMismatch for whole blocks of different sizes.
        """
        ...

    def read_word(self, index: int) -> int:
        """Returns the lease word as it is now. A full barrier comes before the read."""
        ...

    def close(self) -> None:
        """Unmaps. No pull may be under way. The second time nothing happens."""
        ...


class Transport(Protocol):
    """How one engine reaches the caches of others."""

    @property
    def name(self) -> str: ...

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> Peer:
        """Opens a peer whose blocks have `src_block_bytes` bytes; None means as many as ours. It may be called from any
        thread, and waits for drivers and for the peer. Raises PullFailed when the peer is gone, LayoutMismatch when its
        blocks have another size.
        """
        ...

    def close(self) -> None:
        """Ends what the transport runs and closes its peers. Pulls under way fail. The second time nothing happens."""
        ...


class Connection(Protocol):
    """One peer that is being opened, and then is open or cannot be opened. Nothing here blocks."""

    def poll(self) -> bool:
        """True once the connection is terminal: the peer is open, or never will be."""
        ...

    def peer(self) -> Peer:
        """Returns the open peer. Raises TransferError if it could not be opened. The connection must be terminal."""
        ...

    def close(self) -> None:
        """Lets go of the peer, from which no pull is under way. It is closed soon, by another thread than the caller's;
        one that is still being opened is closed as soon as it is open. The second time nothing happens.
        """
        ...


class Connector(Protocol):
    """A transport for a thread that must not wait."""

    @property
    def name(self) -> str:
        """The transport's."""
        ...

    def connect(self, endpoint: Endpoint) -> Connection:
        """Begins to open a peer."""
        ...

    def close(self) -> None:
        """Closes the transport and what was opened. Does not wait for ever for a peer that is still being opened."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedCache:
    """What a prefill engine has for its peers to read."""

    cache: KVCache
    """On a GPU the segment's nonce lies behind the last block."""
    segment: SharedSegment
    """It holds lease words and nonce, and the cache, too, if that lies in host memory."""
    num_peers: int
    """So many decode engines may connect at once."""


class TwoSided(Protocol):
    """One transport from its exporting to its importing side: a module of transports/, listed in registry.py."""

    KIND: str
    """Its name in configurations, endpoints and metrics."""
    MEMORY: tuple[MemoryKind, ...]
    """The kinds of memory between whose caches it moves blocks."""

    def export(self, exported: ExportedCache, resources: ExitStack) -> Endpoint:
        """Makes a cache readable until `resources` are closed. Raises PullFailed where the transport cannot work."""
        ...

    def import_into(self, cache: KVCache, notify: Notify) -> Transport:
        """Pulls into `cache`. Raises PullFailed where the transport cannot work."""
        ...
