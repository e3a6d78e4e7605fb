"""Over every transport: a pull moves its span of each block, and no byte beside it, also between blocks of different
sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import pytest

from kv_transfer.block_span import BlockSpan, checked_span, copies_of
from kv_transfer.config import TransferConfig
from kv_transfer.device.device import Gather, KVCache
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.select import choose
from kv_transfer.transport import Peer, Transport
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.local import LocalNetwork, LocalTransport
from kv_transfer.transports.registry import names
from protocol.errors import LayoutMismatch, PullFailed
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS = 16
THEIRS, OURS = 4096, 1536
"""Bytes of a block there, as of an engine with all heads, and here, as of one with fewer."""
GATHERED = "cuda_ipc, gathered"
KINDS = ("local", *dict.fromkeys(names("host") + names("GPU")), GATHERED)
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="the extra `nixl` is not installed")


class Pulling:
    """A cache here and one of random content there, connected by one transport."""

    def __init__(self, kind: str, name: str, src_block_bytes: int, dst_block_bytes: int, resources: ExitStack) -> None:
        self.theirs, self.ends = content(NUM_BLOCKS, src_block_bytes), Ends()
        self.cache, self.transport, endpoint = self._made(kind, name, src_block_bytes, dst_block_bytes, resources)
        resources.callback(self.transport.close)
        self.connect: Callable[..., Peer] = lambda *size: self.transport.connect(endpoint, *size)

    def _made(
        self, kind: str, name: str, src_block_bytes: int, dst_block_bytes: int, resources: ExitStack
    ) -> tuple[np.ndarray, Transport, bytes]:
        if kind == "local":
            network, cache = LocalNetwork(), np.zeros((NUM_BLOCKS, dst_block_bytes), np.uint8)
            network.export(b"there", self.theirs, np.zeros(1, np.uint64))
            return cache, LocalTransport(network, cache, self.ends, immediate=True), b"there"
        gather, kind = (_gather, cuda_ipc.KIND) if kind == GATHERED else (None, kind)
        memory = "host" if kind in names("host") else "GPU"
        exporter = Exporter("tests.kv_transfer.exporter", memory, kind, name, NUM_BLOCKS, src_block_bytes)
        resources.callback(exporter.stop)
        here = _cache_here(memory, name, dst_block_bytes, gather, resources)
        transport = choose(TransferConfig(transport=kind), here, self.ends)
        return here.tensor, transport, exporter.endpoint


def _cache_here(memory: str, name: str, block_bytes: int, gather: Gather | None, resources: ExitStack) -> KVCache:
    if memory == "host":
        return KVCache.in_host_memory(np.zeros((NUM_BLOCKS, block_bytes), np.uint8))
    device = FakeDevice(f"{name}-here")
    pointer = device.allocate(NUM_BLOCKS * block_bytes)
    resources.callback(device.free, pointer)
    tensor = device.tensor(pointer, NUM_BLOCKS, block_bytes)
    return KVCache(pointer, NUM_BLOCKS, block_bytes, tensor, device, gather)


def _gather(src: np.ndarray, src_ids: np.ndarray, dst: np.ndarray, dst_ids: np.ndarray) -> None:
    dst[dst_ids] = src[src_ids]


@pytest.fixture
def start() -> Iterator[Callable[[str, int, int], Pulling]]:
    with unused_name() as name, ExitStack() as resources:
        yield lambda kind, theirs, ours: Pulling(kind, name, theirs, ours, resources)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_nixl if kind == "nixl" else ()) for kind in KINDS])
def test_a_span_moves_and_nothing_beside_it(kind: str, start: Callable[[str, int, int], Pulling]) -> None:
    pulling = start(kind, THEIRS, OURS)
    peer = pulling.connect(THEIRS)
    rng = np.random.default_rng(5)
    # All of our block; a part in the middle; one that does not lie on 8 bytes; the last byte of both.
    for span in (
        BlockSpan(2048, 0, OURS),
        BlockSpan(512, 256, 1024),
        BlockSpan(13, 6, 999),
        BlockSpan(THEIRS - 1, OURS - 1, 1),
    ):
        # Neighbours on both sides among them: they are no run here.
        src, dst = np.append([3, 4, 5], rng.permutation(3)), np.append([9, 10, 11], rng.permutation(3))
        pulling.cache[:] = 77
        assert pulling.ends.of(peer.pull(src.tolist(), dst.tolist(), span)) == ""
        expected = np.full_like(pulling.cache, 77)
        part = pulling.theirs[src, span.src_offset : span.src_offset + span.length]
        expected[dst, span.dst_offset : span.dst_offset + span.length] = part
        assert np.array_equal(pulling.cache, expected)
    with pytest.raises(LayoutMismatch, match=f"blocks there have {THEIRS} bytes, here {OURS}"):
        peer.pull([1], [1])
    with pytest.raises(PullFailed, match="do not lie within a block"):
        peer.pull([1], [1], BlockSpan(0, 1, OURS))
    with pytest.raises(LayoutMismatch):
        pulling.connect()
    peer.close()


@pytest.mark.parametrize("kind", ["local", "shared_memory", "cuda_ipc", "host_staged"])
def test_a_span_of_blocks_of_one_size(kind: str, start: Callable[[str, int, int], Pulling]) -> None:
    pulling = start(kind, OURS, OURS)
    peer = pulling.connect()
    pulling.cache[:] = 77
    assert pulling.ends.of(peer.pull(range(4), range(4), BlockSpan(512, 1024, 512))) == ""
    expected = np.full_like(pulling.cache, 77)
    expected[:4, 1024:] = pulling.theirs[:4, 512:1024]
    assert np.array_equal(pulling.cache, expected)
    assert pulling.ends.of(peer.pull(range(NUM_BLOCKS), range(NUM_BLOCKS), BlockSpan(0, 0, OURS))) == ""
    assert np.array_equal(pulling.cache, pulling.theirs)
    peer.close()


@pytest.mark.parametrize(
    "span", [BlockSpan(0, 0, 0), BlockSpan(0, 0, -1), BlockSpan(-1, 0, 1), BlockSpan(0, -1, 1), BlockSpan(5, 0, 4)]
)
def test_a_span_lies_within_both_blocks(span: BlockSpan) -> None:
    with pytest.raises(PullFailed, match=r"bytes -?\d+ \.\. -?\d+ do not lie within a block of 8"):
        checked_span(span, 8, 8)


def test_only_whole_blocks_have_neighbours() -> None:
    src, dst = np.array([2, 3, 7]), np.array([5, 6, 1])
    assert checked_span(None, 8, 8) == BlockSpan(0, 0, 8)
    assert copies_of(src, dst, BlockSpan(0, 0, 8), 8, 8).tolist() == [[16, 40, 16], [56, 8, 8]]
    assert copies_of(src, dst, BlockSpan(4, 0, 4), 8, 4).tolist() == [[20, 20, 4], [28, 24, 4], [60, 4, 4]]
