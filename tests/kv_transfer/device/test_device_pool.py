"""The make-believe GPU, a pool in it, and a stream to copy with."""

from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.device import device_pool
from kv_transfer.device.device_pool import GRANULE_BYTES, DevicePool, DeviceStream
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.segment import DIRECTORY, PREFIX
from protocol.errors import PullFailed
from tests.kv_transfer.processes import unused_name

NONCE = bytes(range(16))


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


@pytest.fixture
def device(name: str) -> FakeDevice:
    return FakeDevice(name)


def test_a_pool_is_zero_shared_whole_and_ends_with_its_nonce(device: FakeDevice, name: str) -> None:
    pool = DevicePool(device, NONCE, num_blocks=5, block_bytes=1000)
    assert pool.cache.tensor.shape == (5, 1000) and not pool.cache.tensor.any()
    assert pool.cache.num_bytes == 5000
    with DeviceStream(device) as stream:
        assert stream.read(pool.cache.pointer + 5000, 16) == NONCE
    [file] = DIRECTORY.glob(f"{PREFIX}{name}*")
    assert file.stat().st_size % GRANULE_BYTES == 2 * 4096  # what the file holds besides
    pool.close()


def test_a_pool_that_cannot_be_written_leaves_nothing(device: FakeDevice) -> None:
    device.failures["copy"] = "an illegal memory access was encountered (700)"
    with pytest.raises(PullFailed, match="illegal memory access"):
        DevicePool(device, NONCE, num_blocks=1, block_bytes=16)


def test_work_is_done_in_order_and_when_asked_for(device: FakeDevice) -> None:
    source, destination = np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)
    stream = DeviceStream(device, num_events=2)
    stream.copy(destination.ctypes.data, source.ctypes.data, 2)
    stream.record(0)
    stream.copy(destination.ctypes.data + 2, source.ctypes.data + 2, 2)
    stream.record(1)
    assert not destination.any()
    assert stream.reached(0) and destination.tolist() == [0, 1, 0, 0]
    stream.drain()
    assert stream.reached(1) and destination.tolist() == [0, 1, 2, 3]
    stream.close()


def test_an_event_stands_for_its_last_record(device: FakeDevice) -> None:
    source, destination = np.ones(2, np.uint8), np.zeros(2, np.uint8)
    stream = DeviceStream(device, num_events=1)
    for i in range(2):
        stream.copy(destination.ctypes.data + i, source.ctypes.data, 1)
        stream.record(0)
    assert stream.reached(0) and destination.tolist() == [1, 1]
    stream.close()


def test_a_stalled_gpu_is_given_up(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "PROOF_S", 0.01)
    device.stall_after(0)
    memory = np.zeros(16, np.uint8)
    stream = DeviceStream(device)
    with pytest.raises(PullFailed, match=r"GPU fake:0 did not end a copy within 0.01 s"):
        stream.read(memory.ctypes.data, 16)
    stream.close()


def test_a_process_cannot_map_its_own_memory(device: FakeDevice) -> None:
    pointer = device.allocate(16)
    with pytest.raises(PullFailed, match="invalid device context"):
        device.open(device.share(pointer))
    device.free(pointer)
