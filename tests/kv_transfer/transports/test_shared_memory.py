"""Pulls between two real processes, death of the exporter, cancelling, and refusals."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kv_transfer.device.device import KVCache
from kv_transfer.segment import DIRECTORY, PREFIX, SharedSegment, remove_stale
from kv_transfer.transport import Endpoint, ExportedCache
from kv_transfer.transports import shared_memory
from kv_transfer.transports.copy_blocks import copy_blocks
from kv_transfer.transports.pull_thread import Pull
from protocol.errors import LayoutMismatch, PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 32, 4096


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


@pytest.fixture
def exporter(name: str) -> Iterator[Exporter]:
    exporter = Exporter("tests.kv_transfer.exporter", "host", "shared_memory", name, NUM_BLOCKS, BLOCK_BYTES)
    yield exporter
    exporter.stop()


class Puller:
    """A transport into a cache of its own, and a queue that says when a pull has ended."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.cache = np.zeros((num_blocks, block_bytes), np.uint8)
        self.ends = Ends()
        self.transport = shared_memory.import_into(KVCache.in_host_memory(self.cache), self.ends)

    def wait(self, pull: Pull) -> str:
        return self.ends.of(pull)


@pytest.fixture
def puller() -> Iterator[Puller]:
    puller = Puller()
    yield puller
    puller.transport.close()


def test_bytes_and_words_of_another_process(exporter: Exporter, puller: Puller) -> None:
    peer = puller.transport.connect(exporter.endpoint)
    rng = np.random.default_rng(2)
    source = rng.permutation(NUM_BLOCKS)[:20].tolist()
    destination = rng.permutation(NUM_BLOCKS)[:20].tolist()
    assert puller.wait(peer.pull(source, destination)) == ""
    expected = np.zeros_like(puller.cache)
    expected[destination] = content(NUM_BLOCKS, BLOCK_BYTES)[source]
    assert np.array_equal(puller.cache, expected)

    assert peer.read_word(3) == 0
    exporter.ask(f"write 3 {1 << 32 | 7}")
    assert peer.read_word(3) == 1 << 32 | 7
    exporter.ask("clear 3")
    assert peer.read_word(3) == 0
    peer.close()


def test_the_exporter_is_killed_while_in_use(exporter: Exporter, puller: Puller, name: str) -> None:
    peer = puller.transport.connect(exporter.endpoint)
    exporter.ask("write 0 5")
    assert puller.wait(peer.pull([1], [1])) == ""
    assert remove_stale(f"{PREFIX}{name}") == []
    exporter.kill()
    blocks = list(range(NUM_BLOCKS))
    assert puller.wait(peer.pull(blocks, blocks[::-1])) == ""
    assert np.array_equal(puller.cache[::-1], content(NUM_BLOCKS, BLOCK_BYTES))
    assert remove_stale(f"{PREFIX}{name}") == [DIRECTORY / f"{PREFIX}{name}"]
    puller.cache[:] = 0
    assert puller.wait(peer.pull(blocks, blocks)) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES))
    assert peer.read_word(0) == 5
    with pytest.raises(PullFailed, match="No such file"):
        puller.transport.connect(exporter.endpoint)
    peer.close()


@pytest.fixture
def segment(name: str) -> Iterator[SharedSegment]:
    segment = SharedSegment.create(name, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS, num_words=2)
    segment.cache[:] = content(NUM_BLOCKS, BLOCK_BYTES)
    yield segment
    segment.close()


def endpoint_of(segment: SharedSegment) -> Endpoint:
    cache = KVCache.in_host_memory(segment.cache)
    return shared_memory.export(ExportedCache(cache=cache, segment=segment, num_peers=1), ExitStack())


def test_a_queued_pull_is_cancelled_before_it_starts(segment: SharedSegment) -> None:
    first_ended, go_on, second_ended = threading.Event(), threading.Event(), threading.Event()

    def notify() -> None:
        if first_ended.is_set():
            second_ended.set()
        else:
            first_ended.set()
            assert go_on.wait(HANG_S)

    cache = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    transport = shared_memory.import_into(KVCache.in_host_memory(cache), notify)
    peer = transport.connect(endpoint_of(segment))
    peer.pull([1], [1])
    assert first_ended.wait(HANG_S)
    second = peer.pull([2], [2])
    second.cancel()
    assert not second.poll()
    go_on.set()
    assert second_ended.wait(HANG_S)
    assert second.poll()
    assert second.error == "cancelled"
    assert not cache[2].any()
    transport.close()


def test_a_running_pull_is_cancelled_between_two_pieces(
    segment: SharedSegment, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    copy = copy_blocks

    def copy_then_cancel(*arguments: Any) -> None:
        copy(*arguments)
        pulls.get(timeout=HANG_S).cancel()

    monkeypatch.setattr(shared_memory, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(shared_memory, "copy_blocks", copy_then_cancel)
    pull = puller.transport.connect(endpoint_of(segment)).pull(range(5), range(5))
    pulls.put(pull)
    assert puller.wait(pull) == "cancelled"
    assert np.array_equal(puller.cache[:2], segment.cache[:2])
    assert not puller.cache[2:].any()


def test_closing_the_transport_fails_what_is_queued(segment: SharedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def gated(*_: Any) -> None:
        begun.set()
        assert go_on.wait(HANG_S)

    puller = Puller()
    peer = puller.transport.connect(endpoint_of(segment))
    monkeypatch.setattr(shared_memory, "copy_blocks", gated)
    first, second = peer.pull([1], [1]), peer.pull([2], [2])
    assert begun.wait(HANG_S)
    closer = threading.Thread(target=puller.transport.close)
    closer.start()
    while True:
        try:
            peer.pull([], [])
        except PullFailed:
            break
    go_on.set()
    closer.join()
    assert (first.poll(), first.error) == (True, "")
    assert (second.poll(), second.error) == (True, "cancelled")


@pytest.mark.parametrize("blocks", [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])])
def test_block_ids_are_checked(segment: SharedSegment, puller: Puller, blocks: tuple[list[int], list[int]]) -> None:
    peer = puller.transport.connect(endpoint_of(segment))
    with pytest.raises(PullFailed):
        peer.pull(*blocks)


def test_the_same_path_with_other_memory_is_refused(segment: SharedSegment, puller: Puller) -> None:
    other = {**json.loads(endpoint_of(segment)), "nonce": "00" * 16}
    with pytest.raises(PullFailed, match="not ours"):
        puller.transport.connect(json.dumps(other).encode())


def test_blocks_of_another_size_are_refused(segment: SharedSegment) -> None:
    puller = Puller(block_bytes=BLOCK_BYTES * 2)
    with pytest.raises(LayoutMismatch, match=r"4096 bytes, here 8192"):
        puller.transport.connect(endpoint_of(segment))
    puller.transport.close()


@pytest.mark.parametrize(
    "endpoint", [b"", b"nixl://", b"{}", b'{"kind": "nixl", "path": "/", "nonce": "", "block_bytes": 4096}']
)
def test_endpoints_of_others_are_refused(puller: Puller, endpoint: bytes) -> None:
    with pytest.raises(PullFailed):
        puller.transport.connect(endpoint)


def test_readers_cannot_write(segment: SharedSegment) -> None:
    reader = SharedSegment.open(segment.path, segment.nonce)
    with pytest.raises(ValueError, match="read-only"):
        reader.cache[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.words[0] = 1
    reader.close()


@pytest.mark.parametrize("block_bytes", [4, 12, 64])
def test_odd_block_sizes(name: str, block_bytes: int) -> None:
    segment = SharedSegment.create(name, block_bytes=block_bytes, num_blocks=5, num_words=1)
    segment.cache[:] = content(5, block_bytes)
    puller = Puller(5, block_bytes)
    assert puller.wait(puller.transport.connect(endpoint_of(segment)).pull([4, 0, 1], [1, 2, 3])) == ""
    assert np.array_equal(puller.cache[1:4], segment.cache[[4, 0, 1]])
    puller.transport.close()
    segment.close()
