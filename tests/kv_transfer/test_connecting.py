"""Peers are opened and closed beside the engine's loop, whatever their transport makes of it."""

import logging
import threading
from collections.abc import Callable

import pytest

from kv_transfer import connecting
from kv_transfer.connecting import ThreadConnection, ThreadConnector
from kv_transfer.transport import Endpoint, Peer, Pending
from protocol.errors import LayoutMismatch, PullFailed, TransferError
from tests.hang import HANG_S
from tests.kv_transfer.processes import Ends

OPENS, HANGS = b"opens", b"hangs"


class SomePeer:
    def __init__(self, said: list[tuple[str, int]], close_error: str) -> None:
        self._said, self._close_error = said, close_error

    def pull(self, src_blocks: object, dst_blocks: object, span: object = None) -> Pending:
        raise PullFailed("nothing moves here")

    def read_word(self, index: int) -> int:
        return index

    def close(self) -> None:
        self._said.append(("close", threading.get_ident()))
        if self._close_error:
            raise PullFailed(self._close_error)


class SomeTransport:
    """Opens every peer at once but HANGS, which waits for `go_on`."""

    name = "some"

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        """What was done, and in which thread."""
        self.hanging, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.close_error = ""

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> Peer:
        if endpoint == HANGS:
            self.hanging.set()
            assert self.go_on.wait(HANG_S)
        if self.error is not None:
            raise self.error
        self.said.append(("open", threading.get_ident()))
        return SomePeer(self.said, self.close_error)

    def close(self) -> None:
        self.said.append(("close all", threading.get_ident()))

    @property
    def acts(self) -> list[str]:
        return [act for act, _ in self.said]


@pytest.fixture
def transport() -> SomeTransport:
    return SomeTransport()


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def connector(transport: SomeTransport, ends: Ends) -> ThreadConnector:
    return ThreadConnector(transport, ends)


def hang(connector: ThreadConnector, transport: SomeTransport) -> ThreadConnection:
    connection = connector.connect(HANGS)
    assert transport.hanging.wait(HANG_S)
    assert not connection.poll()
    return connection


def test_a_peer_is_opened_and_closed_by_a_thread_of_its_own(
    connector: ThreadConnector, transport: SomeTransport, ends: Ends
) -> None:
    connection = connector.connect(OPENS)
    ends.wait()
    assert connection.poll() and connection.peer().read_word(7) == 7 and connector.name == "some"
    connection.close()
    connection.close()
    assert connection.has_ended(HANG_S)
    assert transport.acts == ["open", "close"]
    assert len({thread for _, thread in transport.said} | {threading.get_ident()}) == 2
    with pytest.raises(PullFailed, match="not open"):
        connection.peer()  # it is not kept, nor what it had mapped
    connector.close()


@pytest.mark.parametrize(
    ("error", "seen", "text"),
    [
        (PullFailed("gone"), PullFailed, "gone"),
        (LayoutMismatch("8, 16"), LayoutMismatch, "8, 16"),
        (OSError("an alien"), PullFailed, "OSError: an alien"),
    ],
)
def test_every_failure_is_an_end(
    connector: ThreadConnector,
    transport: SomeTransport,
    ends: Ends,
    error: Exception,
    seen: type[TransferError],
    text: str,
) -> None:
    transport.error = error
    connection = connector.connect(OPENS)
    ends.wait()
    assert connection.poll()
    with pytest.raises(seen, match=text):
        connection.peer()
    assert connection.has_ended(HANG_S)
    connector.close()


def test_what_opens_for_nobody_is_closed_where_it_was_opened(
    connector: ThreadConnector, transport: SomeTransport
) -> None:
    connection = hang(connector, transport)
    connection.close()
    assert transport.acts == []
    transport.go_on.set()
    assert connection.has_ended(HANG_S)
    assert transport.acts == ["open", "close"]
    connector.close()


def test_one_that_never_ends_holds_up_neither_others_nor_the_end(
    connector: ThreadConnector,
    transport: SomeTransport,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connecting, "CLOSE_S", 0.01)
    hanging = hang(connector, transport)
    other = connector.connect(OPENS)
    ends.wait()
    assert other.poll() and not hanging.poll()
    with caplog.at_level(logging.WARNING):
        connector.close()
    assert "2 peers could not be closed" in caplog.text
    assert transport.acts == ["open"], "what is in use is left alone"
    transport.go_on.set()
    assert hanging.has_ended(HANG_S)
    monkeypatch.setattr(connecting, "CLOSE_S", HANG_S)
    connector.close()
    assert transport.acts == ["open", "open", "close", "close all", "close"]


@pytest.mark.parametrize("act", [ThreadConnection.close, lambda connection: None])
def test_the_end_leaves_nothing_open(
    connector: ThreadConnector,
    transport: SomeTransport,
    ends: Ends,
    act: Callable[[ThreadConnection], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "CLOSE_S", HANG_S)
    connections = [connector.connect(OPENS) for _ in range(2)]
    for _ in connections:
        ends.wait()
    act(connections[0])
    connector.close()
    assert sorted(transport.acts) == ["close", "close", "close all", "open", "open"]
    assert all(connection.has_ended() for connection in connections)


def test_a_peer_that_cannot_be_closed_is_logged(
    connector: ThreadConnector, transport: SomeTransport, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    transport.close_error = "the context is destroyed (709)"
    connection = connector.connect(OPENS)
    ends.wait()
    with caplog.at_level(logging.WARNING):
        connection.close()
        assert connection.has_ended(HANG_S)
    assert "the context is destroyed" in caplog.text
    connector.close()
