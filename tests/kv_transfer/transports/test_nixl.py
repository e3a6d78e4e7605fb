"""NIXL between two processes of this machine, on host memory. Skipped where the extra `nixl` is not installed."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.hang import HANG_S

pytest.importorskip("nixl", reason="the extra `nixl` is not installed")

from kv_transfer.device.device import KVCache
from kv_transfer.transports import nixl
from kv_transfer.transports.pull_thread import Pull
from protocol.errors import LayoutMismatch, PullFailed
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 32, 3000


class Puller:
    """One transport for all tests: its agent takes seconds."""

    def __init__(self) -> None:
        self.cache = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.ends = Ends()
        self.transport = nixl.import_into(KVCache.in_host_memory(self.cache), self.ends)


@pytest.fixture(scope="module")
def shared_puller() -> Iterator[Puller]:
    puller = Puller()
    yield puller
    puller.transport.close()


@pytest.fixture
def puller(shared_puller: Puller) -> Puller:
    shared_puller.cache[:] = 0
    return shared_puller


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    with unused_name() as name:
        exporter = Exporter("tests.kv_transfer.exporter", "host", "nixl", name, NUM_BLOCKS, BLOCK_BYTES)
        yield exporter
        exporter.stop()


@pytest.mark.parametrize("piece_bytes", [nixl.PIECE_BYTES, 5 * BLOCK_BYTES])
def test_bytes_and_words_of_another_process(
    exporter: Exporter, puller: Puller, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "PIECE_BYTES", piece_bytes)
    peer = puller.transport.connect(exporter.endpoint)
    source, destination = [3, 4, 5, 9, 8, 20, 21], [10, 11, 12, 1, 2, 30, 31]
    assert puller.ends.of(peer.pull(source, destination)) == ""
    expected = np.zeros_like(puller.cache)
    expected[destination] = content(NUM_BLOCKS, BLOCK_BYTES)[source]
    assert np.array_equal(puller.cache, expected)
    exporter.ask(f"write 3 {1 << 32 | 7}")
    assert (peer.read_word(3), peer.read_word(0)) == (1 << 32 | 7, 0)
    exporter.ask("write 3 0")
    assert peer.read_word(3) == 0
    peer.close()


def test_two_connections_to_one_engine_end_one_by_one(exporter: Exporter, puller: Puller) -> None:
    first, second = (puller.transport.connect(exporter.endpoint) for _ in range(2))
    first.close()
    assert puller.ends.of(second.pull([7], [7])) == ""
    assert np.array_equal(puller.cache[7], content(NUM_BLOCKS, BLOCK_BYTES)[7])
    second.close()


def test_a_cancelled_pull_starts_no_further_piece(
    exporter: Exporter, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "PIECE_BYTES", BLOCK_BYTES)
    peer = puller.transport.connect(exporter.endpoint)
    assert isinstance(peer.source, nixl.RemoteAgent)
    agent, pulls = peer.source.agent, queue.SimpleQueue[Pull]()
    read = agent.read

    def read_then_cancel(*arguments: Any) -> bool:
        came = read(*arguments)
        if came:
            pulls.get(timeout=HANG_S).cancel()
        return came

    monkeypatch.setattr(agent, "read", read_then_cancel)
    pull = peer.pull([1, 3, 5], [1, 3, 5])
    pulls.put(pull)
    assert puller.ends.of(pull) == "cancelled"
    assert np.array_equal(puller.cache[1], content(NUM_BLOCKS, BLOCK_BYTES)[1])
    assert not puller.cache[2:].any()
    peer.close()


def test_the_exporter_is_killed(puller: Puller) -> None:
    with unused_name() as name:
        exporter = Exporter("tests.kv_transfer.exporter", "host", "nixl", name, NUM_BLOCKS, BLOCK_BYTES)
        peer = puller.transport.connect(exporter.endpoint)
        exporter.ask("write 2 9")
        assert peer.read_word(2) == 9
        exporter.kill()
        assert "NIXL" in puller.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS)))
        assert peer.read_word(2) == 0  # what cannot be read is no lease
        with pytest.raises(PullFailed):
            puller.transport.connect(exporter.endpoint)
        peer.close()
        exporter.stop()


def test_refusals(exporter: Exporter, puller: Puller) -> None:
    small = nixl.import_into(KVCache.in_host_memory(np.zeros((2, 8), np.uint8)), puller.ends)
    with pytest.raises(LayoutMismatch):
        small.connect(exporter.endpoint)
    small.close()
    nonce = exporter.endpoint.replace(b'"nonce": "', b'"nonce": "00')
    with pytest.raises(PullFailed, match="not the one that was offered"):
        puller.transport.connect(nonce)
