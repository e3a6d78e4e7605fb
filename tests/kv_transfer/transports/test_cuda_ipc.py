"""Pulls out of another process's make-believe GPU memory."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kv_transfer.device.device import KVCache
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.cuda_ipc import GATHER_BELOW_BYTES
from protocol.errors import LayoutMismatch, PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 32, 4096


class Puller:
    """A transport into a cache in this process's own GPU memory."""

    def __init__(
        self, name: str, block_bytes: int = BLOCK_BYTES, *, gathers: bool = False, has_batches: bool = True
    ) -> None:
        self.device = FakeDevice(f"{name}-here", has_batches=has_batches)
        self.pointer = self.device.allocate(NUM_BLOCKS * block_bytes)
        self.cache = self.device.tensor(self.pointer, NUM_BLOCKS, block_bytes)
        self.ends = Ends()
        tensor = self.cache
        cache = KVCache(self.pointer, NUM_BLOCKS, block_bytes, tensor, self.device, gather if gathers else None)
        self.transport = cuda_ipc.import_into(cache, self.ends)

    def close(self) -> None:
        self.transport.close()
        self.device.free(self.pointer)


def gather(src: np.ndarray, src_ids: np.ndarray, dst: np.ndarray, dst_ids: np.ndarray) -> None:
    dst[dst_ids] = src[src_ids]


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


@pytest.fixture
def exporter(name: str) -> Iterator[Exporter]:
    exporter = Exporter("tests.kv_transfer.exporter", "GPU", "cuda_ipc", name, NUM_BLOCKS, BLOCK_BYTES)
    yield exporter
    exporter.stop()


@pytest.fixture
def puller(name: str) -> Iterator[Puller]:
    puller = Puller(name)
    yield puller
    puller.close()


@pytest.mark.parametrize("has_batches", [True, False])
def test_bytes_and_words_of_another_process(exporter: Exporter, name: str, has_batches: bool) -> None:
    puller = Puller(name, has_batches=has_batches)
    peer = puller.transport.connect(exporter.endpoint)
    source, destination = [3, 4, 5, 9, 8, 20], [10, 11, 12, 1, 2, 3]
    num_before, num_calls = puller.device.num_copies, puller.device.num_copy_calls
    assert puller.ends.of(peer.pull(source, destination)) == ""
    expected = np.zeros_like(puller.cache)
    expected[destination] = content(NUM_BLOCKS, BLOCK_BYTES)[source]
    assert np.array_equal(puller.cache, expected)
    assert puller.device.num_copies - num_before == 4  # one for each run
    assert puller.device.num_copy_calls - num_calls == (1 if has_batches else 4)
    exporter.ask(f"write 3 {1 << 32 | 7}")
    assert (peer.read_word(3), peer.read_word(0)) == (1 << 32 | 7, 0)
    puller.close()


def test_an_empty_pull_ends_at_once(exporter: Exporter, puller: Puller) -> None:
    assert puller.ends.of(puller.transport.connect(exporter.endpoint).pull([], [])) == ""


def test_small_runs_go_through_the_kernel_and_large_ones_do_not(exporter: Exporter, name: str) -> None:
    puller = Puller(name, gathers=True)
    peer = puller.transport.connect(exporter.endpoint)
    blocks = np.random.default_rng(3).permutation(NUM_BLOCKS)
    num_copies = puller.device.num_copies
    assert puller.ends.of(peer.pull(blocks.tolist(), range(NUM_BLOCKS))) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES)[blocks])
    assert (puller.device.num_gathers, puller.device.num_copies) == (1, num_copies)
    assert NUM_BLOCKS * BLOCK_BYTES >= GATHER_BELOW_BYTES
    puller.cache[:] = 0
    assert puller.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS))) == ""
    assert np.array_equal(puller.cache, content(NUM_BLOCKS, BLOCK_BYTES))
    assert (puller.device.num_gathers, puller.device.num_copies) == (1, num_copies + 1)
    puller.close()


def test_a_pull_of_many_pieces(exporter: Exporter, puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "PIECE_BYTES", 3 * BLOCK_BYTES)
    blocks = np.random.default_rng(4).permutation(NUM_BLOCKS)
    assert puller.ends.of(puller.transport.connect(exporter.endpoint).pull(range(NUM_BLOCKS), blocks.tolist())) == ""
    assert np.array_equal(puller.cache[blocks], content(NUM_BLOCKS, BLOCK_BYTES))


def test_a_cancelled_pull_ends_only_when_nothing_writes_any_more(
    exporter: Exporter, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "PIECE_BYTES", BLOCK_BYTES)
    peer = puller.transport.connect(exporter.endpoint)
    puller.device.stall_after(3)
    pull = peer.pull(range(0, 20, 2), range(0, 20, 2))
    assert puller.device.stalled.wait(HANG_S)
    pull.cancel()
    assert not pull.poll()
    puller.device.resume()
    assert puller.ends.of(pull) == "cancelled"
    before = puller.cache.copy()
    assert puller.ends.of(peer.pull([], [])) == ""
    assert np.array_equal(puller.cache, before)
    assert not puller.cache[10:].any()  # two pieces at most were under way beside those that had ended


def test_a_stalled_pull_is_not_terminal_and_the_destination_stays_reserved(exporter: Exporter, puller: Puller) -> None:
    peer = puller.transport.connect(exporter.endpoint)
    puller.device.stall_after(1)
    pull = peer.pull([0, 2], [0, 2])
    assert puller.device.stalled.wait(HANG_S)
    pull.cancel()
    assert not pull.poll()
    puller.device.resume()
    assert puller.ends.of(pull) == ""  # all was under way already, and arrived
    assert np.array_equal(puller.cache[2], content(NUM_BLOCKS, BLOCK_BYTES)[2])


@pytest.mark.parametrize(
    ("call", "text"), [("copy", "invalid argument (1)"), ("reached", "an illegal memory access was encountered (700)")]
)
def test_a_failing_gpu_ends_the_pull_with_its_own_words(
    exporter: Exporter, puller: Puller, call: str, text: str
) -> None:
    peer = puller.transport.connect(exporter.endpoint)
    puller.device.failures[call] = text
    assert puller.ends.of(peer.pull([1], [1])) == f"{call}: {text}"
    del puller.device.failures[call]
    assert puller.ends.of(peer.pull([2], [2])) == ""


def test_an_error_that_is_not_ours_ends_the_pull_too(exporter: Exporter, puller: Puller) -> None:
    """A kernel that does not compile raises what its library likes."""
    peer = puller.transport.connect(exporter.endpoint)
    for call in ("copy", "gather", "record"):
        puller.device.failures[call] = RuntimeError("no kernel image")
    assert puller.ends.of(peer.pull([1], [1])) == "RuntimeError: no kernel image"
    puller.device.failures.clear()
    assert puller.ends.of(peer.pull([2], [2])) == ""


def test_the_exporter_is_killed_in_mid_pull(exporter: Exporter, puller: Puller) -> None:
    peer = puller.transport.connect(exporter.endpoint)
    exporter.ask("write 0 5")
    puller.device.stall_after(4)
    pull = peer.pull(range(0, 32, 2), range(0, 32, 2))
    assert puller.device.stalled.wait(HANG_S)
    exporter.kill()
    puller.device.resume()
    # This GPU keeps mapped memory, so the bytes come; a driver that did not would end the pull with an error.
    assert puller.ends.of(pull) == ""
    assert peer.read_word(0) == 5
    puller.device.failures["close"] = "the context is destroyed (709)"
    peer.close()
    with pytest.raises(PullFailed, match="closed"):
        peer.pull([1], [1])
    puller.device.failures.clear()


def test_memory_that_cannot_be_mapped_is_refused_and_nothing_stays_open(
    exporter: Exporter, puller: Puller, name: str
) -> None:
    puller.device.failures["open"] = "peer access is not supported between these two devices (217)"
    with pytest.raises(PullFailed, match="peer access is not supported"):
        puller.transport.connect(exporter.endpoint)
    puller.device.failures = {"copy": "unspecified launch failure (719)"}
    with pytest.raises(PullFailed, match="unspecified launch failure"):
        puller.transport.connect(exporter.endpoint)
    puller.device.failures = {}
    assert puller.device.num_opened == 0


def test_mapped_memory_without_the_nonce_is_refused(exporter: Exporter, puller: Puller) -> None:
    fewer = {**json.loads(exporter.endpoint), "num_blocks": NUM_BLOCKS - 1}
    with pytest.raises(PullFailed, match="not the one that was offered"):
        puller.transport.connect(json.dumps(fewer).encode())
    assert puller.device.num_opened == 0


def test_blocks_of_another_size_are_refused(exporter: Exporter, name: str) -> None:
    puller = Puller(name, block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(LayoutMismatch):
        puller.transport.connect(exporter.endpoint)
    puller.close()


def test_two_connections_to_one_engine_share_its_memory(exporter: Exporter, puller: Puller) -> None:
    with ExitStack() as closing:
        first, second = (puller.transport.connect(exporter.endpoint) for _ in range(2))
        closing.callback(second.close)
        first.close()
        assert puller.ends.of(second.pull([7], [7])) == ""
        assert np.array_equal(puller.cache[7], content(NUM_BLOCKS, BLOCK_BYTES)[7])
    assert puller.device.num_opened == 0
