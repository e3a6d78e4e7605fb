"""NIXL finds the GPU current in every thread that calls it. A NIXL of make-believe copies inside this process."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer.connecting import ThreadConnector
from kv_transfer.device.device import KVCache
from kv_transfer.device.device_pool import DevicePool
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import SharedSegment
from kv_transfer.transport import ExportedCache
from kv_transfer.transports import nixl
from protocol.errors import PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.processes import Ends, content, unused_name

NUM_BLOCKS, BLOCK_BYTES = 8, 64


class FakeNIXL:
    """What `nixl._api` offers. It refuses a call from a thread in which the GPU is not current."""

    def __init__(self) -> None:
        self.device: FakeDevice
        """The GPU of the process that calls now."""
        self.threads: set[int] = set()
        self.agents: set[str] = set()
        """Remote agents that are known, by name."""
        self.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
        self.nixl_agent_config = SimpleNamespace

    def nixl_agent(self, name: str, config: Any) -> "FakeAgent":
        self.called()
        return FakeAgent(self, name)

    def called(self) -> None:
        self.threads.add(threading.get_ident())
        if not self.device.is_bound:
            raise RuntimeError("invalid device context (201)")


class FakeAgent:
    def __init__(self, nixl: FakeNIXL, name: str) -> None:
        self._nixl, self._name = nixl, name

    def register_memory(self, pieces: Any, kind: str) -> object:
        self._nixl.called()
        return object()

    def deregister_memory(self, registered: object) -> None:
        self._nixl.called()

    def get_agent_metadata(self) -> bytes:
        self._nixl.called()
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._nixl.called()
        self._nixl.agents.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self._nixl.called()
        self._nixl.agents.remove(name)

    def get_xfer_descs(self, pieces: np.ndarray, kind: str) -> np.ndarray:
        self._nixl.called()
        return pieces

    def initialize_xfer(self, act: str, here: np.ndarray, there: np.ndarray, name: str) -> list[tuple[int, ...]]:
        self._nixl.called()
        return [(to, origin, size) for (to, size, _), (origin, _, _) in zip(here.tolist(), there.tolist(), strict=True)]

    def transfer(self, copies: list[tuple[int, ...]]) -> str:
        self._nixl.called()
        for to, origin, size in copies:
            ctypes.memmove(to, origin, size)
        return "PROC"

    def check_xfer_state(self, copies: object) -> str:
        self._nixl.called()
        return "DONE"

    def release_xfer_handle(self, copies: object) -> None:
        self._nixl.called()


@pytest.fixture
def fake_nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNIXL:
    fake = FakeNIXL()
    modules = {"nixl._api": fake, "nixl._bindings": SimpleNamespace()}
    monkeypatch.setattr(nixl, "import_module", modules.__getitem__)
    return fake


@pytest.fixture
def name() -> Iterator[str]:
    with unused_name() as name:
        yield name


class World:
    """An exporter and an importer in this process, each with a GPU of its own. The importer calls NIXL from now on."""

    def __init__(self, fake_nixl: FakeNIXL, name: str, resources: ExitStack) -> None:
        there, here = FakeDevice(f"{name}-there"), FakeDevice(f"{name}-here")
        segment = SharedSegment.create(f"{name}-words", block_bytes=BLOCK_BYTES, num_blocks=0, num_words=2)
        resources.callback(segment.close)
        fake_nixl.device = there
        pool = DevicePool(there, segment.nonce, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
        resources.callback(pool.close)
        pool.cache.tensor[:] = content(NUM_BLOCKS, BLOCK_BYTES)
        LeaseTable(segment.words, epoch=1).write(1, 5)
        self.endpoint = nixl.export(ExportedCache(cache=pool.cache, segment=segment, num_peers=1), resources)
        pointer = here.allocate(NUM_BLOCKS * BLOCK_BYTES)
        resources.callback(here.free, pointer)
        self.tensor = here.tensor(pointer, NUM_BLOCKS, BLOCK_BYTES)
        fake_nixl.device = here
        resources.callback(setattr, fake_nixl, "device", there)
        self.ends = Ends()
        transport = nixl.import_into(KVCache(pointer, NUM_BLOCKS, BLOCK_BYTES, self.tensor, here), self.ends)
        self.connector = ThreadConnector(transport, self.ends)
        resources.callback(self.connector.close)


@pytest.fixture
def world(fake_nixl: FakeNIXL, name: str) -> Iterator[World]:
    with ExitStack() as resources:
        yield World(fake_nixl, name, resources)


def test_the_gpu_is_current_wherever_nixl_is_called(fake_nixl: FakeNIXL, world: World) -> None:
    """Opening and closing, pulling, and reading the word happen in three threads."""
    fake_nixl.threads.clear()
    connection = world.connector.connect(world.endpoint)
    world.ends.wait()
    with ThreadPoolExecutor(1) as engine:
        assert world.ends.of(connection.peer().pull([3], [5])) == ""
        assert np.array_equal(world.tensor[5], content(NUM_BLOCKS, BLOCK_BYTES)[3])
        assert engine.submit(connection.peer().read_word, 1).result(HANG_S) == 5
    connection.close()
    assert connection.has_ended(HANG_S)
    assert len(fake_nixl.threads - {threading.get_ident()}) == 3
    assert fake_nixl.agents == set()


def test_an_engine_that_is_opened_again_while_it_is_closed_stays_known(
    fake_nixl: FakeNIXL, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, added, go_on = threading.Event(), threading.Event(), threading.Event()
    remove, add = FakeAgent.remove_remote_agent, FakeAgent.add_remote_agent

    def remove_slowly(self: FakeAgent, name: str) -> None:
        removing.set()
        assert go_on.wait(HANG_S)
        remove(self, name)

    def add_and_say(self: FakeAgent, metadata: bytes) -> str:
        name = add(self, metadata)
        added.set()
        return name

    old = world.connector.connect(world.endpoint)
    world.ends.wait()
    monkeypatch.setattr(FakeAgent, "remove_remote_agent", remove_slowly)
    monkeypatch.setattr(FakeAgent, "add_remote_agent", add_and_say)
    old.close()
    assert removing.wait(HANG_S)
    new = world.connector.connect(world.endpoint)
    assert not added.wait(0.1)
    go_on.set()
    world.ends.wait()
    assert old.has_ended(HANG_S) and len(fake_nixl.agents) == 1
    assert world.ends.of(new.peer().pull([3], [5])) == ""


def test_a_call_from_an_unbound_thread_would_be_found(fake_nixl: FakeNIXL, name: str) -> None:
    fake_nixl.device = FakeDevice(name)
    with pytest.raises(PullFailed, match="invalid device context"):
        nixl.Agent("agent", lambda: None)
