"""A transport inside one process, for the simulator and tests: every pull moves when its driver says so, block by
block, and a peer opens when its driver says so.

So a pull can fail, stop half way, or end after its lease died and its blocks were reused; a peer can open after nobody
wants it any more, or never.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.block_span import BlockSpan, checked_span
from kv_transfer.layout import Blocks
from kv_transfer.lease import Words
from kv_transfer.transport import Endpoint, Notify
from protocol.errors import LayoutMismatch, ProtocolError, PullFailed, TransferError

KIND = "local"


@dataclass(slots=True)
class Exported:
    """One engine's readable memory. The arrays are the engine's own and no copies."""

    cache: Blocks
    words: Words


@dataclass(slots=True)
class LocalNetwork:
    """Who can be reached: the driver puts exporters in and out. `pulls` are those under way, in the order in which they
    started. `connections` are those that are not terminal. `peers` are those that are mapped; while there is one, its
    exporter's memory stays allocated.
    """

    exported: dict[Endpoint, Exported] = field(default_factory=dict)
    pulls: list["LocalPull"] = field(default_factory=list)
    peers: list["LocalPeer"] = field(default_factory=list)
    connections: list["LocalConnection"] = field(default_factory=list)

    def export(self, endpoint: Endpoint, cache: Blocks, words: Words) -> None:
        self.exported[endpoint] = Exported(cache, words)

    def remove(self, endpoint: Endpoint) -> None:
        """The exporter died: nobody can connect any more. Its pages stay readable for those who are connected."""
        del self.exported[endpoint]

    def is_mapped(self, endpoint: Endpoint) -> bool:
        return any(peer.endpoint == endpoint for peer in self.peers)


class LocalPull:
    """A pull whose bytes move when the driver calls `advance`; `fail` ends it, `cancel` makes the next `advance` end
    it.
    """

    def __init__(
        self,
        network: LocalNetwork,
        source: Blocks,
        destination: Blocks,
        pairs: list[tuple[int, int]],
        span: BlockSpan,
        notify: Notify,
    ) -> None:
        self._network, self._notify = network, notify
        self._source = source
        self.destination = destination
        self.destination_blocks = [pair[1] for pair in pairs]
        self._pairs, self._span = pairs, span
        self.cancelled = False
        self.num_blocks = len(pairs)
        self.num_moved = 0
        self.done = False
        self.error = ""
        network.pulls.append(self)

    def poll(self) -> bool:
        return self.done

    def cancel(self) -> None:
        self.cancelled = True

    def advance(self, num_blocks: int | None = None) -> None:
        """Copies the next `num_blocks` blocks, or all that are left, as they are in the source now. After the last one
        the pull is terminal.
        """
        if self.done:
            return
        if self.cancelled:
            self.fail("cancelled")
            return
        end = self.num_blocks if num_blocks is None else min(self.num_moved + num_blocks, self.num_blocks)
        begin, to, length = self._span.src_offset, self._span.dst_offset, self._span.length
        for source, destination in self._pairs[self.num_moved : end]:
            self.destination[destination, to : to + length] = self._source[source, begin : begin + length]
        self.num_moved = end
        if end == self.num_blocks:
            self._end("")

    def fail(self, error: str) -> None:
        """The pull is terminal now, without the blocks that have not moved yet."""
        if not self.done:
            self._end(error)

    def _end(self, error: str) -> None:
        self.done, self.error = True, error
        self._network.pulls.remove(self)
        self._notify()


class LocalPeer:
    def __init__(
        self, network: LocalNetwork, endpoint: Endpoint, cache: Blocks, notify: Notify, immediate: bool
    ) -> None:
        self.endpoint, self.cache = endpoint, cache
        self._network, self._exported = network, network.exported[endpoint]
        self._notify, self._immediate = notify, immediate
        network.peers.append(self)

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int], span: BlockSpan | None = None) -> LocalPull:
        self._check_open()
        pairs, source = list(zip(src_blocks, dst_blocks, strict=True)), self._exported.cache
        checked = checked_span(span, source.shape[1], self.cache.shape[1])
        pull = LocalPull(self._network, source, self.cache, pairs, checked, self._notify)
        if self._immediate:
            pull.advance()
        return pull

    def read_word(self, index: int) -> int:
        self._check_open()
        return int(self._exported.words[index])

    def close(self) -> None:
        if self in self._network.peers:
            self._network.peers.remove(self)

    def _check_open(self) -> None:
        """Elsewhere the memory would not be mapped any more."""
        if self not in self._network.peers:
            raise ProtocolError(f"{self.endpoint!r} is read after it was let go of")


class LocalTransport:
    """Pulls into `cache`. With `immediate` every pull is terminal before `pull` returns, for tests that care about
    nothing in between.
    """

    name = KIND

    def __init__(
        self,
        network: LocalNetwork,
        cache: Blocks,
        notify: Notify = lambda: None,
        *,
        immediate: bool = False,
    ) -> None:
        self._network, self.cache, self._notify, self._immediate = network, cache, notify, immediate

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> LocalPeer:
        expected = self.cache.shape[1] if src_block_bytes is None else src_block_bytes
        exported = self._network.exported.get(endpoint)
        if exported is None:
            raise PullFailed(f"endpoint {endpoint!r} is gone")
        if exported.cache.shape[1] != expected:
            raise LayoutMismatch(f"blocks there have {exported.cache.shape[1]} bytes, here {expected}")
        return LocalPeer(self._network, endpoint, self.cache, self._notify, self._immediate)

    def close(self) -> None:
        pass


class LocalConnection:
    """A peer that is mapped at once and open when the driver calls `advance`; `fail` ends the attempt."""

    def __init__(self, network: LocalNetwork, transport: LocalTransport, endpoint: Endpoint, notify: Notify) -> None:
        self.cache = transport.cache
        self._network, self._notify = network, notify
        self._peer: LocalPeer | None = None
        self._error: TransferError | None = None
        self.done = self.let_go = False
        try:
            self._peer = transport.connect(endpoint)
        except TransferError as error:
            self._error = error
        network.connections.append(self)

    def poll(self) -> bool:
        return self.done

    def peer(self) -> LocalPeer:
        if self._peer is None:
            raise self._error or PullFailed("the peer is not open")
        return self._peer

    def close(self) -> None:
        self.let_go = True
        if self.done and self._peer is not None:
            self._peer.close()

    def advance(self) -> None:
        """The connection is terminal now. A peer that was let go of meanwhile is closed at once."""
        self.done = True
        self._network.connections.remove(self)
        if self.let_go:
            self.close()
        self._notify()

    def fail(self, error: str) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer, self._error = None, PullFailed(error)
        self.advance()


class LocalConnector:
    """What a service is given of a LocalTransport."""

    name = KIND

    def __init__(self, network: LocalNetwork, cache: Blocks, notify: Notify = lambda: None) -> None:
        self._network, self._notify = network, notify
        self._transport = LocalTransport(network, cache, notify)

    def connect(self, endpoint: Endpoint) -> LocalConnection:
        return LocalConnection(self._network, self._transport, endpoint, self._notify)

    def close(self) -> None:
        pass
