"""What an engine offers and what its peer chooses, from the configuration on, between two processes."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.endpoint import offers
from kv_transfer.exports import Export
from kv_transfer.select import choose
from kv_transfer.transport import Transport
from kv_transfer.transports import host_staged
from kv_transfer.transports.registry import names
from protocol.errors import ConfigError
from tests.kv_transfer.processes import Ends, Exporter, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 16, 4096
SHAPE: Any = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "num_words": 4, "num_peers": 1}


HOST = KVCache.in_host_memory(np.zeros((2, 8), np.uint8))


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


@pytest.fixture
def start(name: str) -> Iterator[Callable[[str, str], Exporter]]:
    started: list[Exporter] = []

    def start(memory: str, transport: str) -> Exporter:
        started.append(Exporter("tests.kv_transfer.exporter", memory, transport, name, NUM_BLOCKS, BLOCK_BYTES))
        return started[-1]

    yield start
    for exporter in started:
        exporter.stop()


def check(transport: Transport, endpoint: bytes, cache: np.ndarray, ends: Ends) -> None:
    peer = transport.connect(endpoint)
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    assert ends.of(peer.pull(range(NUM_BLOCKS), order.tolist())) == ""
    assert np.array_equal(cache[order], content(NUM_BLOCKS, BLOCK_BYTES))
    assert peer.read_word(1) == 0
    peer.close()


@pytest.mark.parametrize(
    ("peers", "chosen", "log"),
    [
        ({"fake:0"}, "cuda_ipc", "transport cuda_ipc: moved the peer's nonce; same GPU"),
        (
            set(),
            "host_staged",
            "refused before: cuda_ipc: open: peer access is not supported between these two devices (217)",
        ),
    ],
)
def test_gpu_memory_takes_the_best_way_there_is(
    start: Callable[[str, str], Exporter],
    name: str,
    peers: set[str],
    chosen: str,
    log: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = start("GPU", "auto")
    assert [offer["kind"] for offer in offers(exporter.endpoint)][:2] == ["cuda_ipc", "host_staged"]
    device = FakeDevice(f"{name}-here", peers=frozenset(peers))
    pointer = device.allocate(NUM_BLOCKS * BLOCK_BYTES)
    cache, ends = device.tensor(pointer, NUM_BLOCKS, BLOCK_BYTES), Ends()
    transport = choose(TransferConfig(), KVCache(pointer, NUM_BLOCKS, BLOCK_BYTES, cache, device), ends)
    with caplog.at_level(logging.INFO):
        check(transport, exporter.endpoint, cache, ends)
    assert transport.name == chosen
    [line] = [record.getMessage() for record in caplog.records if record.name == "kv_transfer.select"]
    assert log in line
    transport.close()
    device.free(pointer)
    exporter.stop()


@pytest.mark.parametrize("transport", ["cuda_ipc", "host_staged"])
def test_gpu_memory_offers_only_what_was_configured(
    start: Callable[[str, str], Exporter], name: str, transport: Any
) -> None:
    exporter = start("GPU", transport)
    assert [offer["kind"] for offer in offers(exporter.endpoint)] == [transport]
    device = FakeDevice(f"{name}-here")
    pointer = device.allocate(NUM_BLOCKS * BLOCK_BYTES)
    cache, ends = device.tensor(pointer, NUM_BLOCKS, BLOCK_BYTES), Ends()
    here = KVCache(pointer, NUM_BLOCKS, BLOCK_BYTES, cache, device)
    named = choose(TransferConfig(transport=transport), here, ends)
    assert named.name == transport
    check(named, exporter.endpoint, cache, ends)
    named.close()
    device.free(pointer)
    exporter.stop()


def test_host_memory_is_shared(start: Callable[[str, str], Exporter]) -> None:
    exporter = start("host", "auto")
    cache, ends = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8), Ends()
    transport = choose(TransferConfig(), KVCache.in_host_memory(cache), ends)
    check(transport, exporter.endpoint, cache, ends)
    assert transport.name == "shared_memory"
    transport.close()


def test_a_transport_that_cannot_work_here_is_named_at_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(name)
    with pytest.raises(
        ConfigError, match=f"cuda_ipc moves nothing out of host memory; auto, {', '.join(names('host'))} do"
    ):
        Export(TransferConfig(transport="cuda_ipc"), name, **SHAPE)
    with pytest.raises(ConfigError, match="transfer.transport: shared_memory moves nothing out of GPU memory"):
        Export(TransferConfig(transport="shared_memory"), name, device, **SHAPE)
    with pytest.raises(ConfigError, match="host_staged moves nothing out of host memory"):
        choose(TransferConfig(transport="host_staged"), HOST, lambda: None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(
        ConfigError, match=r"transfer.transport: nixl cannot work here: nixl: NIXL is not installed \(extra `nixl`\)"
    ):
        Export(TransferConfig(transport="nixl"), name, **SHAPE)
    with pytest.raises(ConfigError, match="nixl cannot work here"):
        choose(TransferConfig(transport="nixl"), HOST, lambda: None)
    device.failures["pin"] = "operation not permitted (800)"
    with pytest.raises(ConfigError, match="host_staged cannot work here: host_staged: pin: operation not permitted"):
        Export(TransferConfig(transport="host_staged"), name, device, **SHAPE)
    device.failures["copy"] = "unspecified launch failure (719)"
    with pytest.raises(ConfigError, match="GPU fake:0: copy: unspecified launch failure"):
        Export(TransferConfig(), name, device, **SHAPE)


def test_auto_offers_what_is_left(name: str) -> None:
    device = FakeDevice(name)
    device.failures["pin"] = "operation not permitted (800)"
    export = Export(TransferConfig(), name, device, **SHAPE)
    kinds = {offer["kind"] for offer in offers(export.endpoint)}
    assert "cuda_ipc" in kinds and "host_staged" not in kinds
    export.close()


def test_without_room_in_shared_memory_auto_goes_without_staging(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose /dev/shm has the usual 64 MiB."""
    monkeypatch.setattr(host_staged, "BUFFER_BYTES", 1 << 44)
    export = Export(TransferConfig(), name, FakeDevice(name), **SHAPE)
    kinds = {offer["kind"] for offer in offers(export.endpoint)}
    assert "cuda_ipc" in kinds and "host_staged" not in kinds
    assert re.search(r"host_staged lacks room: /dev/shm: \d{14,} bytes .* needed .*, \d+ available", caplog.text)
    export.close()
    with pytest.raises(ConfigError, match="host_staged cannot work here: host_staged: /dev/shm"):
        Export(TransferConfig(transport="host_staged"), name, FakeDevice(name), **SHAPE)
