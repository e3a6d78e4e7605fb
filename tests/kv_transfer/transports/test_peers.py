"""What all transports do alike: their peers' threads, and closing."""

import gc
import weakref
from contextlib import ExitStack

import numpy as np
import pytest

from kv_transfer.device.device import KVCache
from kv_transfer.endpoint import Offer, single
from kv_transfer.transports.peers import PullPeer, PullTransport
from kv_transfer.transports.pull_thread import Pull
from protocol.errors import LayoutMismatch, PullFailed
from tests.kv_transfer.processes import Ends

HERE = single("some", num_blocks=4, block_bytes=8)


class Source:
    num_blocks = 4

    def copy(self, pull: Pull) -> str:
        return ""

    def read_word(self, index: int) -> int:
        return 10 + index


class World:
    """A transport, and what its opened sources gave back."""

    def __init__(self, *, one_thread: bool = False) -> None:
        self.ends = Ends()
        self.given_back: list[str] = []
        self.fails = False
        cache = KVCache.in_host_memory(np.zeros((6, 8), np.uint8))
        self.transport = PullTransport("some", cache, self.ends, self.open, one_thread=one_thread)
        self.transport.resources.callback(self.given_back.append, "transport")

    def open(self, offer: Offer, resources: ExitStack) -> Source:
        resources.callback(self.given_back.append, "peer")
        if self.fails:
            raise PullFailed("no")
        return Source()

    def connect(self) -> PullPeer:
        return self.transport.connect(HERE)


@pytest.mark.parametrize("one_thread", [False, True])
def test_closing_a_transport_ends_pulls_then_peers_then_what_it_holds_itself(one_thread: bool) -> None:
    world = World(one_thread=one_thread)
    peers = [world.connect() for _ in range(2)]
    assert world.ends.of(peers[0].pull([3], [5])) == ""
    assert peers[0].read_word(2) == 12
    world.transport.close()
    assert world.given_back == ["peer", "peer", "transport"]
    for peer in peers:
        with pytest.raises(PullFailed, match="closed"):
            peer.pull([], [])
    world.transport.close()
    peers[0].close()
    assert world.given_back == ["peer", "peer", "transport"]


@pytest.mark.parametrize("one_thread", [False, True])
def test_closing_a_peer_leaves_the_others(one_thread: bool) -> None:
    world = World(one_thread=one_thread)
    first, second = world.connect(), world.connect()
    first.close()
    first.close()
    assert world.given_back == ["peer"]
    assert world.ends.of(second.pull([1], [1])) == ""
    world.transport.close()
    assert world.given_back == ["peer", "peer", "transport"]


def test_a_closed_peer_is_not_kept() -> None:
    world = World()
    peer = world.connect()
    peer.close()
    kept = weakref.ref(peer.source)
    del peer
    gc.collect()
    assert kept() is None
    world.transport.close()


def test_a_peer_that_cannot_be_opened_gives_everything_back() -> None:
    world = World()
    world.fails = True
    with pytest.raises(PullFailed, match="no"):
        world.connect()
    assert world.given_back == ["peer"]
    world.transport.close()
    assert world.given_back == ["peer", "transport"]


def test_block_ids_and_sizes_are_checked_before_anything_moves() -> None:
    world = World()
    peer = world.connect()
    with pytest.raises(PullFailed, match="block 4 there is outside"):
        peer.pull([4], [0])
    with pytest.raises(PullFailed, match="block 6 here is outside"):
        peer.pull([0], [6])
    with pytest.raises(LayoutMismatch):
        world.transport.connect(single("some", num_blocks=4, block_bytes=16))
    world.transport.close()
