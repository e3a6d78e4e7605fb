"""Pulls under way, and connections to the peers that they read. A pull's destination stays reserved until the pull is
terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kv_transfer.checksum import Checksum
from kv_transfer.transport import Connection, Connector, Endpoint, Pending
from protocol.clock import Clock
from protocol.errors import ChecksumMismatch, LeaseLost, PullFailed, TransferError
from protocol.messages import Address, RequestKey


@dataclass(slots=True)
class _Pull:
    pending: Pending
    connection: Connection
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
    """Each request has at most one pull. The verbs are `start`, `ended` and `cancel`; those of peers are `connect`,
    `connected`, `give_up` and `disconnect`. None of them waits for a peer.
    """

    def __init__(self, connector: Connector, clock: Clock, checksum: Checksum | None) -> None:
        self._connector = connector
        self._clock = clock
        self._checksum = checksum
        """Checksums of blocks here; None where bytes are believed."""
        self._opening: dict[Address, Connection] = {}
        self._open: dict[Address, Connection] = {}
        self._retired: list[Connection] = []
        """Open ones to prefill replicas that are replaced or dead; each is closed when no pull reads from it any more.
        """
        self._running: dict[RequestKey, _Pull] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._running

    def connect(self, address: Address, endpoint: Endpoint) -> None:
        """Begins to open a prefill replica's cache, in the place of its older epochs and of an earlier connection.
        Pulls from it may start once `connected` has said so.
        """
        self._retire([old for old in (*self._open, *self._opening) if old.replica_id == address.replica_id])
        self._opening[address] = self._connector.connect(endpoint)

    def connected(self) -> list[tuple[Address, TransferError | None]]:
        """Returns the replicas whose connections have become terminal since the last call, each with its error. Pulls
        from a replica that could not be opened fail at their start.
        """
        ends: list[tuple[Address, TransferError | None]] = []
        for address in [address for address, connection in self._opening.items() if connection.poll()]:
            connection = self._opening.pop(address)
            try:
                connection.peer()
            except TransferError as error:
                ends.append((address, error))
            else:
                self._open[address] = connection
                ends.append((address, None))
        return ends

    def is_opening(self, address: Address) -> bool:
        """True while it is not known yet whether pulls from a replica can start."""
        return address in self._opening

    def disconnect(self, address: Address | None = None) -> None:
        """A prefill replica (None: every one) is dead or unknown: its pulls are cancelled, and its cache is unmapped
        when the last of them is terminal, or its connection. No-op for one that is not known.
        """
        for pull in self._running.values():
            if address is None or pull.source == address:
                pull.pending.cancel()
        self._retire([known for known in (*self._open, *self._opening) if address is None or known == address])

    def give_up(self, address: Address) -> TransferError:
        """A replica that is still being opened counts as one that could not be opened. Returns the error."""
        self._opening.pop(address).close()
        return PullFailed("opening it takes too long")

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
        connection = self._open.get(source)
        if connection is None:
            raise PullFailed(f"the cache of {source.replica_id} epoch {source.epoch} is not open")
        pending = connection.peer().pull(src_blocks, dst_blocks)
        self._running[key] = _Pull(
            pending, connection, source, lease_index, lease_id, dst_blocks, checksums, self._clock()
        )

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
        if pull.connection.peer().read_word(pull.lease_index) != pull.lease_id:
            return LeaseLost(f"lease {pull.lease_id:#x} of {pull.source.replica_id} ended before the pull did")
        if self._checksum is not None and (found := self._checksum(pull.dst_blocks)) != tuple(pull.checksums):
            wrong = sum(mine != theirs for mine, theirs in zip_longest(found, pull.checksums))
            return ChecksumMismatch(f"{wrong} of {len(found)} blocks of {pull.source.replica_id} arrived changed")
        return None

    def _retire(self, addresses: list[Address]) -> None:
        for connections in (self._opening, self._open):
            self._retired += [connections.pop(address) for address in addresses if address in connections]
        self._close_retired()

    def _close_retired(self) -> None:
        used = [pull.connection for pull in self._running.values()]
        for connection in self._retired:
            if connection not in used:
                connection.close()
        self._retired = [connection for connection in self._retired if connection in used]
