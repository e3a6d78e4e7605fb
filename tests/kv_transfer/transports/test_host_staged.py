"""Pulls from GPU to GPU through a ring in host memory, between two real processes."""

import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kv_transfer.device.device import KVCache
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.segment import PREFIX, remove_stale
from kv_transfer.transports import host_staged
from kv_transfer.transports.peers import PullPeer
from kv_transfer.transports.pull_thread import Pull
from kv_transfer.transports.staging.channel import MAX_PIECES
from kv_transfer.transports.staging.client import StagingClient, cut
from protocol.errors import PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.exporter import BUFFER_BYTES, NUM_PEERS
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 32, 3000
"""BLOCK_BYTES and the bytes of a buffer do not divide each other: blocks are cut at the edges of buffers."""
NUM_CHANNELS = 2 * NUM_PEERS
NUM_CALLS_BEFORE = 2
"""The exporter's copies before the first pull: the nonce into its pool, and out of it for the peer."""


class Puller:
    """A transport into a cache in this process's own GPU memory."""

    def __init__(self, name: str) -> None:
        self.device = FakeDevice(f"{name}-here")
        self.pointer = self.device.allocate(NUM_BLOCKS * BLOCK_BYTES)
        self.cache = self.device.tensor(self.pointer, NUM_BLOCKS, BLOCK_BYTES)
        self.ends = Ends()
        cache = KVCache(self.pointer, NUM_BLOCKS, BLOCK_BYTES, self.cache, self.device)
        self.transport = host_staged.import_into(cache, self.ends)

    def connect(self, exporter: Exporter) -> PullPeer:
        """The nonce's trace is wiped out."""
        peer = self.transport.connect(exporter.endpoint)
        self.cache[:] = 0
        return peer

    def close(self) -> None:
        self.transport.close()
        self.device.free(self.pointer)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staged, "STALL_S", HANG_S)


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


@pytest.fixture
def exporter(name: str) -> Iterator[Exporter]:
    exporter = Exporter("tests.kv_transfer.exporter", "GPU", "host_staged", name, NUM_BLOCKS, BLOCK_BYTES)
    yield exporter
    exporter.stop()


@pytest.fixture
def puller(name: str) -> Iterator[Puller]:
    puller = Puller(name)
    yield puller
    puller.close()


def test_bytes_and_words_of_another_process(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    rng = np.random.default_rng(2)
    for _ in range(5):
        puller.cache[:] = 0
        number = rng.integers(0, NUM_BLOCKS + 1)
        source, destination = rng.permutation(NUM_BLOCKS)[:number], rng.permutation(NUM_BLOCKS)[:number]
        assert puller.ends.of(peer.pull(source.tolist(), destination.tolist())) == ""
        expected = np.zeros_like(puller.cache)
        expected[destination] = content(NUM_BLOCKS, BLOCK_BYTES)[source]
        assert np.array_equal(puller.cache, expected)
    exporter.ask(f"write 3 {1 << 32 | 7}")
    assert (peer.read_word(3), peer.read_word(0)) == (1 << 32 | 7, 0)
    peer.close()
    assert not puller.device.pinned


def test_a_pull_is_cut_into_buffers(name: str) -> None:
    copies = np.array([(150, 30, 60), (270, 90, 30)])
    parts = [part.tolist() for part in cut(copies, 40)]
    assert parts == [[[150, 30, 40]], [[190, 70, 20], [270, 90, 20]], [[290, 110, 10]]]
    assert [len(part) for part in cut(np.ones((2 * MAX_PIECES, 3), np.int64), 10**6)] == [MAX_PIECES, MAX_PIECES]
    assert cut(copies[:0], 40) == []


def test_a_buffer_is_one_call(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    num_copies, num_calls = puller.device.num_copies, puller.device.num_copy_calls
    scattered = list(range(0, NUM_BLOCKS, 2))
    assert puller.ends.of(peer.pull(scattered, scattered)) == ""
    num_buffers = -(-len(scattered) * BLOCK_BYTES // BUFFER_BYTES)
    assert puller.device.num_copy_calls - num_calls == num_buffers
    assert puller.device.num_copies - num_copies > num_buffers
    assert int(exporter.ask("num_copy_calls")) == num_buffers + NUM_CALLS_BEFORE


def test_two_peers_at_once_and_no_third(exporter: Exporter, name: str) -> None:
    pullers = [Puller(f"{name}-{i}") for i in range(NUM_CHANNELS)]
    peers = [puller.connect(exporter) for puller in pullers]
    with pytest.raises(PullFailed, match="all 2 channels of the exporter are taken"):
        pullers[0].transport.connect(exporter.endpoint)
    orders = [np.random.default_rng(i).permutation(NUM_BLOCKS) for i in range(NUM_CHANNELS)]
    pulls = [peer.pull(range(NUM_BLOCKS), order.tolist()) for peer, order in zip(peers, orders, strict=True)]
    for puller, pull, order in zip(pullers, pulls, orders, strict=True):
        assert puller.ends.of(pull) == ""
        assert np.array_equal(puller.cache[order], content(NUM_BLOCKS, BLOCK_BYTES))
    peers[0].close()
    again = pullers[0].connect(exporter)  # a channel that was let go can be claimed
    assert pullers[0].ends.of(again.pull([1], [1])) == ""
    for puller in pullers:
        puller.close()


def test_peers_that_open_at_once_take_turns_in_block_0(
    exporter: Exporter, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    proving: queue.SimpleQueue[None] = queue.SimpleQueue()
    prove = StagingClient.prove

    def prove_slowly(self: StagingClient, nonce_offset: int, nonce: bytes) -> None:
        proving.put(None)
        go_on.acquire()
        prove(self, nonce_offset, nonce)

    go_on = threading.Semaphore(0)
    monkeypatch.setattr(StagingClient, "prove", prove_slowly)
    with ThreadPoolExecutor(NUM_CHANNELS) as threads:
        opening = [threads.submit(puller.transport.connect, exporter.endpoint) for _ in range(NUM_CHANNELS)]
        for _ in opening:
            proving.get(timeout=HANG_S)
            with pytest.raises(queue.Empty):
                proving.get(timeout=0.1)
            go_on.release()
        for one in opening:
            one.result(HANG_S).close()


def client_of(peer: PullPeer) -> StagingClient:
    assert isinstance(peer.source, host_staged.ClaimedChannel)
    return peer.source.client


def stall_exporter_in_mid_pull(exporter: Exporter, puller: Puller, peer: PullPeer) -> Pull:
    """A pull of all blocks of which some bytes are on their way and no more will come."""
    exporter.ask("stall_after 5")
    pull = peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))
    exporter.ask("stalled")
    assert not pull.poll()
    return pull


def test_cancelled_in_mid_pull_the_channel_serves_the_next(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    pull = stall_exporter_in_mid_pull(exporter, puller, peer)
    pull.cancel()
    assert puller.ends.of(pull) == "cancelled"
    assert not puller.cache[-1].any()
    before = puller.cache.copy()
    exporter.ask("resume")
    assert puller.ends.of(peer.pull([], [])) == ""
    assert np.array_equal(puller.cache, before)
    assert puller.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES))


def test_the_exporter_is_killed_in_mid_pull(exporter: Exporter, puller: Puller, name: str) -> None:
    peer = puller.connect(exporter)
    exporter.ask("write 0 5")
    pull = stall_exporter_in_mid_pull(exporter, puller, peer)
    exporter.kill()
    assert puller.ends.of(pull) == "the exporter is gone"
    assert puller.ends.of(peer.pull([1], [1])) == "the exporter is gone"
    assert peer.read_word(0) == 5
    with pytest.raises(PullFailed, match="the exporter is gone"):
        puller.transport.connect(exporter.endpoint)
    remove_stale(f"{PREFIX}{name}")
    with pytest.raises(PullFailed, match="No such file"):
        puller.transport.connect(exporter.endpoint)
    peer.close()
    assert not puller.device.pinned


def test_an_exporter_that_lives_and_does_nothing_fails_the_pull(
    exporter: Exporter, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_staged, "STALL_S", 0.3)
    peer = puller.connect(exporter)
    pull = stall_exporter_in_mid_pull(exporter, puller, peer)
    assert puller.ends.of(pull) == "the exporter has filled no buffer for 0.3 s"
    with pytest.raises(PullFailed, match="has filled no buffer"):
        puller.transport.connect(exporter.endpoint)
    assert len(puller.device.pinned) == 1
    exporter.ask("resume")
    assert puller.ends.of(peer.pull([3], [3])) == ""
    assert np.array_equal(puller.cache[3], content(NUM_BLOCKS, BLOCK_BYTES)[3])


def test_the_exporter_s_gpu_fails(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    exporter.ask("fail copy invalid argument (1)")
    assert puller.ends.of(peer.pull([1], [1])) == "the exporter: copy: invalid argument (1)"
    exporter.ask("fail reached an illegal memory access was encountered (700)")
    with pytest.raises(PullFailed):
        puller.transport.connect(exporter.endpoint)


def test_an_error_that_is_not_ours_ends_the_pull_too(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    for call in ("copy", "reached"):
        exporter.ask(f"raise {call} no kernel image")
        assert puller.ends.of(peer.pull([1], [1])) == "the exporter: RuntimeError: no kernel image"
        exporter.ask(f"heal {call}")
        assert puller.ends.of(peer.pull([1], [1])) == ""
    puller.device.failures["copy"] = RuntimeError("out of resources")
    assert puller.ends.of(peer.pull([1], [1])) == "RuntimeError: out of resources"


def test_our_own_gpu_fails(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    puller.device.failures["copy"] = "invalid argument (1)"
    assert puller.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))) == "copy: invalid argument (1)"
    del puller.device.failures["copy"]
    assert puller.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES))
    puller.device.failures["pin"] = "out of memory (2)"
    with pytest.raises(PullFailed, match="pin: out of memory"):
        puller.transport.connect(exporter.endpoint)


def test_orders_outside_the_cache_are_refused(exporter: Exporter, puller: Puller) -> None:
    """A peer that asks for what is not its to see: the exporter trusts no number."""
    peer = puller.connect(exporter)
    client = client_of(peer)
    channel = client._channel
    for piece, reason in [
        ((-1, 4), "do not lie in the cache"),
        ((NUM_BLOCKS * BLOCK_BYTES, 17), "do not lie"),
        ((0, 4097), "4096 bytes"),
        ((2**62, 2**62), "do not lie"),
        ((2**63 - 1, 1), "do not lie"),
    ]:
        number = channel.num_ordered
        channel.order(np.array([piece]))
        client._await(number)
        assert reason in channel.error(number)
    assert puller.ends.of(peer.pull([1], [1])) == ""


def test_a_closed_peer_keeps_no_memory_of_the_exporter(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    assert puller.ends.of(peer.pull([1], [1])) == ""
    memory = weakref.ref(client_of(peer)._channel._memory)
    peer.close()
    del peer
    gc.collect()
    assert memory() is None


def test_a_channel_left_in_mid_pull_serves_who_claims_it_next(exporter: Exporter, puller: Puller) -> None:
    peer = puller.connect(exporter)
    pull = stall_exporter_in_mid_pull(exporter, puller, peer)
    pull.cancel()
    assert puller.ends.of(pull) == "cancelled"
    left = client_of(peer)._channel
    assert left.num_ordered > left.num_filled
    peer.close()
    exporter.ask("resume")
    again = puller.connect(exporter)
    assert client_of(again)._channel.num_ordered > left.num_buffers  # the same channel
    assert puller.ends.of(again.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES))
