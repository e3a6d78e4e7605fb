"""The memory of a dead exporter stays taken until its importers let go of it; then its successor fits."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from decode_pool.pulls import Pulls
from kv_transfer.config import TransferConfig
from kv_transfer.connecting import ThreadConnection, ThreadConnector
from kv_transfer.device.device import KVCache
from kv_transfer.device.device_pool import DeviceStream
from kv_transfer.device.fake_device import FakeDevice, FakeMemory
from kv_transfer.exports import Export
from kv_transfer.lease import LeaseTable
from kv_transfer.transports import cuda_ipc
from protocol.errors import CapacityError
from protocol.messages import Address, RequestKey
from tests.hang import HANG_S
from tests.kv_transfer.processes import Ends, unused_name

NUM_BLOCKS, BLOCK_BYTES = 8, 1 << 18
CAPACITY = 6 << 20
"""Room for one cache of 2 MiB and its nonce (4 MiB in the pieces in which memory is shared), and not for two."""
DEAD, SUCCESSOR = Address("prefill-0", 1), Address("prefill-0", 2)


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


class Node:
    """A GPU of limited memory with exporters, and a decode engine on a GPU of its own that pulls from them."""

    def __init__(self, name: str) -> None:
        self._name, self._memory = name, FakeMemory(CAPACITY)
        self.ends = Ends()
        here = self.device = FakeDevice(f"{name}-here")
        self._pointer = here.allocate(NUM_BLOCKS * BLOCK_BYTES)
        self.tensor = here.tensor(self._pointer, NUM_BLOCKS, BLOCK_BYTES)
        cache = KVCache(self._pointer, NUM_BLOCKS, BLOCK_BYTES, self.tensor, here)
        here._memory = self._memory  # what it opens lies on the exporters' GPU; its own memory elsewhere
        self.transport = cuda_ipc.import_into(cache, self.ends)
        self.connector = ThreadConnector(self.transport, self.ends)
        self.pulls = Pulls(self.connector, lambda: 0.0, None)

    def start(self, address: Address) -> Export:
        """A prefill engine, dead when it is closed. Raises CapacityError where its GPU has no room for the cache."""
        device = FakeDevice(f"{self._name}-{address.epoch}", memory=self._memory, pid=address.epoch)
        config = TransferConfig(transport="cuda_ipc")
        shape = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "num_words": NUM_BLOCKS, "num_peers": 1}
        return Export(config, f"{self._name}-{address.epoch}-words", device, **shape)

    def connect(self, address: Address, endpoint: bytes) -> ThreadConnection:
        """The connection whose end tells that the peer's memory is let go of."""
        self.pulls.connect(address, endpoint)
        self.ends.wait()
        assert self.pulls.connected() == [(address, None)]
        return self.connector._connections[-1]

    def close(self) -> None:
        self.connector.close()
        self.device._memory = None
        self.device.free(self._pointer)


@pytest.fixture
def node(name: str) -> Iterator[Node]:
    node = Node(name)
    yield node
    node.close()


def test_a_successor_fits_once_the_dead_peer_is_let_go_of(node: Node) -> None:
    export = node.start(DEAD)
    connection = node.connect(DEAD, export.endpoint)
    export.close()
    with pytest.raises(CapacityError, match="out of memory"):
        node.start(SUCCESSOR)
    node.pulls.disconnect(DEAD)
    assert connection.has_ended(HANG_S)
    again = node.start(SUCCESSOR)
    again.cache.tensor[:] = 7
    LeaseTable(again.words, epoch=2).write(0, 5)
    connection = node.connect(SUCCESSOR, again.endpoint)
    key = RequestKey(1, "r", 1)
    node.pulls.start(key, SUCCESSOR, [1], [2], lease_index=0, lease_id=5)
    node.ends.wait()
    assert [(end.key, end.error) for end in node.pulls.ended()] == [(key, None)]
    assert np.array_equal(node.tensor[2], again.cache.tensor[1])
    node.pulls.disconnect()
    assert connection.has_ended(HANG_S)
    again.close()


def test_a_pull_that_stalls_keeps_the_memory_until_it_has_ended(node: Node) -> None:
    export = node.start(DEAD)
    LeaseTable(export.words, epoch=1).write(0, 5)
    connection = node.connect(DEAD, export.endpoint)
    node.device.stall_after(0)
    node.pulls.start(RequestKey(1, "r", 1), DEAD, [1], [2], lease_index=0, lease_id=5)
    assert node.device.stalled.wait(HANG_S)
    export.close()
    node.pulls.disconnect(DEAD)
    with pytest.raises(CapacityError):
        node.start(SUCCESSOR)
    node.device.resume()
    node.ends.wait()
    assert len(node.pulls.ended()) == 1
    assert connection.has_ended(HANG_S)
    again = node.start(SUCCESSOR)
    again.close()


def test_memory_that_was_mapped_for_nobody_is_let_go_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer died while it was being opened: its proof comes too late."""
    export = node.start(DEAD)
    proving, go_on = threading.Event(), threading.Event()
    read = DeviceStream.read

    def slow_read(self: DeviceStream, pointer: int, num_bytes: int) -> bytes:
        proving.set()
        assert go_on.wait(HANG_S)
        return read(self, pointer, num_bytes)

    monkeypatch.setattr(DeviceStream, "read", slow_read)
    node.pulls.connect(DEAD, export.endpoint)
    assert proving.wait(HANG_S)
    export.close()
    node.pulls.disconnect(DEAD)
    with pytest.raises(CapacityError):
        node.start(SUCCESSOR)
    go_on.set()
    assert node.connector._connections[-1].has_ended(HANG_S)
    assert node.pulls.connected() == [] and node.device.num_opened == 0
    again = node.start(SUCCESSOR)
    again.close()
