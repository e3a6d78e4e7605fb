"""Pulls under way, and the peers that they read. A pull's destination stays reserved until the pull is terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kv_transfer.checksum import Checksum
from kv_transfer.transport import Endpoint, Peer, Pending, Transport
from protocol.clock import Clock
from protocol.errors import ChecksumMismatch, LeaseLost, PullFailed, TransferError
from protocol.messages import Address, RequestKey


@dataclass(slots=True)
class _Pull:
    pending: Pending
    peer: Peer
    source: Address
    lease_index: int
    lease_id: int
    dst_blocks: Sequence[int]
    checksums: Sequence[int]
    started_at: float


@dataclass(frozen=True, slots=True)
class PullEnd:
    """A pull has become terminal. Where `error` is None, the bytes are here and the lease was still live after the last
    of them.
    """

    key: RequestKey
    seconds: float
    error: TransferError | None


class Pulls:
    """Each request has at most one pull. The verbs are `start`, `ended` and `cancel`; `connect` opens peers, and
    `disconnect` lets go of them.
    """

    def __init__(self, transport: Transport, clock: Clock, checksum: Checksum | None) -> None:
        self._transport = transport
        self._clock = clock
        self._checksum = checksum
        """Checksums of blocks here; None where bytes are believed."""
        self._peers: dict[Address, Peer] = {}
        self._retired: list[Peer] = []
        """Peers of prefill replicas that are replaced or dead; each is closed when no pull reads it any more."""
        self._running: dict[RequestKey, _Pull] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._running

    def connect(self, address: Address, endpoint: Endpoint) -> None:
        """Opens a prefill replica's cache in the place of its older epochs. Raises TransferError; pulls from it then
        fail at their start.
        """
        self._retire([old for old in self._peers if old.replica_id == address.replica_id])
        self._peers[address] = self._transport.connect(endpoint)

    def disconnect(self, address: Address | None = None) -> None:
        """A prefill replica (None: every one) is dead or unknown: its pulls are cancelled, and its cache is unmapped
        when the last of them is terminal. No-op for one that is not open.
        """
        gone = [peer for peer in self._peers if address is None or peer == address]
        for pull in self._running.values():
            if address is None or pull.source == address:
                pull.pending.cancel()
        self._retire(gone)

    def start(
        self,
        key: RequestKey,
        source: Address,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        *,
        lease_index: int,
        lease_id: int,
        checksums: Sequence[int] = (),
    ) -> None:
        """Starts copying `src_blocks[i]` of `source`, with `checksums[i]`, to `dst_blocks[i]` here. Raises
        TransferError if it cannot.
        """
        peer = self._peers.get(source)
        if peer is None:
            raise PullFailed(f"the cache of {source.replica_id} epoch {source.epoch} is not open")
        pending = peer.pull(src_blocks, dst_blocks)
        self._running[key] = _Pull(pending, peer, source, lease_index, lease_id, dst_blocks, checksums, self._clock())

    def ended(self) -> list[PullEnd]:
        """Returns pulls that have become terminal since the last call, each once, with their verdict.

        Safety rests on the order: the bytes are complete, a barrier is passed, then the word is read. Checksums come
        last: they read our own blocks.
        """
        ends = []
        for key in [key for key, pull in self._running.items() if pull.pending.poll()]:
            pull = self._running.pop(key)
            ends.append(PullEnd(key, self._clock() - pull.started_at, self._verdict(pull)))
        if ends:
            self._close_retired()
        return ends

    def cancel(self, key: RequestKey) -> None:
        """Asks the transport to fail a pull. The pull still ends by itself."""
        if key in self._running:
            self._running[key].pending.cancel()

    def _verdict(self, pull: _Pull) -> TransferError | None:
        if pull.pending.error:
            return PullFailed(pull.pending.error)
        if pull.peer.read_word(pull.lease_index) != pull.lease_id:
            return LeaseLost(f"lease {pull.lease_id:#x} of {pull.source.replica_id} ended before the pull did")
        if self._checksum is not None and (found := self._checksum(pull.dst_blocks)) != tuple(pull.checksums):
            wrong = sum(mine != theirs for mine, theirs in zip_longest(found, pull.checksums))
            return ChecksumMismatch(f"{wrong} of {len(found)} blocks of {pull.source.replica_id} arrived changed")
        return None

    def _retire(self, addresses: list[Address]) -> None:
        self._retired += [self._peers.pop(address) for address in addresses]
        self._close_retired()

    def _close_retired(self) -> None:
        used = [pull.peer for pull in self._running.values()]
        for peer in self._retired:
            if peer not in used:
                peer.close()
        self._retired = [peer for peer in self._retired if peer in used]
