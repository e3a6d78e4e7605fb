"""The driven transport: bytes move when told to, also after the lease has died."""

import numpy as np
import pytest

from kv_transfer.transports.local import LocalNetwork, LocalTransport
from protocol.errors import LayoutMismatch, PullFailed

HERE = b"prefill-0"


def network() -> tuple[LocalNetwork, np.ndarray, np.ndarray]:
    """A network with one exporter; block i of its cache is full of i."""
    net = LocalNetwork()
    cache = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 4, axis=1)
    words = np.zeros(2, np.uint64)
    net.export(HERE, cache, words)
    return net, cache, words


def test_a_pull_moves_block_by_block() -> None:
    net, source, _ = network()
    destination, ends = np.zeros((8, 4), np.uint8), []
    pull = LocalTransport(net, destination, lambda: ends.append(1)).connect(HERE).pull([3, 5, 6], [1, 2, 4])
    assert net.pulls == [pull]
    assert not pull.poll()
    assert not destination.any()
    pull.advance(1)
    assert destination[:, 0].tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
    source[5] = 99
    pull.advance()
    assert destination[:, 0].tolist() == [0, 3, 99, 0, 6, 0, 0, 0]
    assert pull.poll()
    assert pull.error == ""
    assert ends == [1]
    assert net.pulls == []


def test_a_pull_fails_or_is_cancelled_half_way() -> None:
    net, _, _ = network()
    destination, ends = np.zeros((8, 4), np.uint8), []
    peer = LocalTransport(net, destination, lambda: ends.append(1)).connect(HERE)
    failed, cancelled = peer.pull([1, 2], [1, 2]), peer.pull([3, 4], [3, 4])
    failed.advance(1)
    failed.fail("cut")
    cancelled.cancel()
    assert not cancelled.poll()
    cancelled.advance()
    assert (failed.error, cancelled.error) == ("cut", "cancelled")
    failed.advance()
    failed.fail("again")
    assert destination[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert ends == [1, 1]
    assert net.pulls == []


def test_words_are_read_as_they_are_now() -> None:
    net, _, words = network()
    peer = LocalTransport(net, np.zeros((8, 4), np.uint8)).connect(HERE)
    words[1] = 9
    assert peer.read_word(1) == 9
    words[1] = 0
    assert peer.read_word(1) == 0
    peer.close()


def test_who_is_connected_still_reads_a_dead_exporter() -> None:
    net, _, _ = network()
    destination = np.zeros((8, 4), np.uint8)
    transport = LocalTransport(net, destination, immediate=True)
    peer = transport.connect(HERE)
    net.remove(HERE)
    assert peer.pull([7], [1]).poll()
    assert destination[1, 0] == 7
    with pytest.raises(PullFailed):
        transport.connect(HERE)
    transport.close()


def test_blocks_of_another_size_are_refused() -> None:
    net, _, _ = network()
    with pytest.raises(LayoutMismatch):
        LocalTransport(net, np.zeros((8, 5), np.uint8)).connect(HERE)
