"""Opens and closes peers in threads of their own. Mapping memory, pinning it and moving a nonce wait for drivers and
for the peer; an engine's loop does not.
"""

import logging
import threading
import time
from collections.abc import Callable

from kv_transfer.transport import Endpoint, Notify, Peer, Transport
from protocol.errors import PullFailed, TransferError
from protocol.start_times import phase

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""A connector that closes waits this long for peers that are being opened or closed. A driver may never answer."""


class ThreadConnection:
    """A peer and the thread that opens and closes it. In between the thread sleeps."""

    def __init__(self, connect: Callable[[], Peer], notify: Notify) -> None:
        self._connect, self._notify = connect, notify
        self._terminal, self._let_go = threading.Event(), threading.Event()
        self._peer: Peer | None = None
        self._error: TransferError | None = None
        self._thread = threading.Thread(target=self._work, name="peer", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        return self._terminal.is_set()

    def peer(self) -> Peer:
        if self._peer is None:
            raise self._error or PullFailed("the peer is not open")
        return self._peer

    def close(self) -> None:
        self._let_go.set()

    @property
    def let_go(self) -> bool:
        return self._let_go.is_set()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """True once the thread has ended, so that nothing is open any more. Waits for that for `timeout_s` at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            with phase("first peer"):
                self._peer = self._connect()
        except TransferError as error:
            self._error = error.with_traceback(None)  # which would keep what was mapped half-way
        except Exception as error:  # who waits for a connection that never becomes terminal learns nothing
            log.exception("a peer failed to open in a way of its own")
            self._error = PullFailed(f"{type(error).__name__}: {error}")
        self._terminal.set()
        self._notify()
        if self._peer is not None:
            self._let_go.wait()
            peer, self._peer = self._peer, None
            try:
                peer.close()
            except PullFailed as error:
                log.warning("a peer could not be closed: %s", error)


class ThreadConnector:
    """Gives each connection a thread, so that one which does not end holds up no other."""

    def __init__(self, transport: Transport, notify: Notify) -> None:
        self._transport, self._notify = transport, notify
        self._connections: list[ThreadConnection] = []
        """Those whose threads have not ended."""

    @property
    def name(self) -> str:
        return self._transport.name

    def connect(self, endpoint: Endpoint) -> ThreadConnection:
        connection = ThreadConnection(lambda: self._transport.connect(endpoint), self._notify)
        self._connections = [other for other in self._connections if not other.has_ended()] + [connection]
        return connection

    def close(self) -> None:
        """Pulls under way fail. If a peer is still being opened or closed after CLOSE_S, nothing more is closed: the
        transport is in use, and the end of the process closes it.
        """
        ends_at = time.monotonic() + CLOSE_S
        for connection in self._connections:
            if not connection.poll():
                connection.close()
        self._await([connection for connection in self._connections if connection.let_go], ends_at)
        if not any(connection.let_go for connection in self._connections):
            self._transport.close()
            for connection in self._connections:
                connection.close()
            self._await(self._connections, ends_at)
        if self._connections:
            log.warning("%d peers could not be closed within %g s", len(self._connections), CLOSE_S)

    def _await(self, ending: list[ThreadConnection], ends_at: float) -> None:
        for connection in ending:
            connection.has_ended(max(0.0, ends_at - time.monotonic()))
        self._connections = [connection for connection in self._connections if not connection.has_ended()]
