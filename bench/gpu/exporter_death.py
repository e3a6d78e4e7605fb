"""Kills the exporter during a pull. The pull must end, the importer must live on and pull from another peer, and the
dead exporter's memory must come back.

The pull is held between two of its pieces until the exporter is gone. So it is under way when the exporter dies, and
what it fetches afterwards is memory of a dead process, however fast or slow GPU and host are.
"""

import secrets
import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu.device_exports import open_device
from bench.gpu.exporter import LEASE_ID, Exporter
from bench.gpu.held_device import HeldDevice
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import SHARED_MEMORY, Setting
from bench.gpu.transfer import Importer

END_S = 20.0
"""Longest wait for a pull to be held, to end, or for memory to come back."""
RETURN_S = 3.0
"""So long a real driver is given to take a dead process's memory back by itself."""


def run(setting: Setting, kind: str, gpu: int) -> Iterator[Item]:
    """The exporters see GPU number `gpu`, the importer GPU 0."""
    num_rounds = setting.size(1, 80)  # a pull of several pieces with every transport, also of a small cache
    torch.manual_seed(setting.seed)
    num_blocks, block_bytes = setting.size((1024, 2 << 20), (16, 1 << 16))
    first, second = (f"{SHARED_MEMORY}{secrets.token_hex(4)}" for _ in range(2))
    with Exporter(setting, first, gpu) as victim, Exporter(setting, second, gpu) as other:
        endpoints = [exporter.export(kind, num_blocks, block_bytes) for exporter in (victim, other)]
        src, dst = torch.randperm(num_blocks).tolist(), torch.randperm(num_blocks).tolist()
        device = HeldDevice(open_device(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}"))
        importer = Importer(setting, kind, device.as_device(), endpoints[0], num_blocks, block_bytes)
        whole_s = importer.pull_s(src * num_rounds, dst * num_rounds)
        memory = _Memory(other, num_blocks * block_bytes)
        device.hold()
        pull = importer.peer.pull(src * num_rounds, dst * num_rounds)
        if not device.held.wait(END_S):
            yield Problem("the pull never reached its first event")
        victim.kill()
        under_way = not pull.poll()
        device.resume()
        if not under_way:
            yield Problem("the pull ended before the exporter did: nothing was tried")
        seconds = _wait(pull.poll, END_S)
        rows: list[tuple[Cell, ...]] = [
            ("under way when the exporter was gone", str(under_way)),
            ("ended by itself", str(pull.poll())),
            ("its error", (pull.error or "none: all bytes came") if pull.poll() else "-"),
            ("the lease word still reads", str(importer.peer.read_word(0) == LEASE_ID)),
        ]
        yield Table(f"{kind}: the pull", (Column("what"), Column("found")), rows)
        columns = (
            Column("from then to its end", "s", measured=True),
            Column("the whole of one before", "s", measured=True),
        )
        yield Table("let go after the death", columns, [(seconds, whole_s)])
        if not pull.poll():
            yield Problem(f"the pull had not ended {END_S:g} s after the exporter's death")
            return
        yield from _memory_returns(setting, memory, importer)
        importer.close()
        again = Importer(setting, kind, device.as_device(), endpoints[1], num_blocks, block_bytes)
        yield from _goes_on(setting, again, src, dst)
        again.close()


def _wait(done: Callable[[], bool], longest_s: float) -> float:
    """Waits until it is done, or `longest_s`. Returns the seconds that it waited."""
    started = time.monotonic()
    while not done() and time.monotonic() - started < longest_s:
        time.sleep(0.001)
    return time.monotonic() - started


class _Memory:
    """Free bytes of the exporters' GPU, which the exporter that lives on is asked for. `before`: while both live."""

    def __init__(self, other: Exporter, pool_bytes: int) -> None:
        self._other, self._pool_bytes = other, pool_bytes
        self.before = other.free_bytes()
        self.now = self.before

    def came_back(self) -> bool:
        """Whether as much as the dead exporter's pool has become free. Its CUDA context, which may become so before,
        takes a quarter of that.
        """
        self.now = self._other.free_bytes()
        return self.now - self.before >= self._pool_bytes


def _memory_returns(setting: Setting, memory: _Memory, importer: Importer) -> Iterator[Item]:
    """Reads the free memory of the dead exporter's GPU before the importer closes the peer, and after. Its own cache
    stays allocated meanwhile.
    """
    _wait(memory.came_back, setting.size(RETURN_S, 0.0))
    at_death, held = memory.came_back(), memory.now
    importer.peer.close()
    closed_s = _wait(memory.came_back, END_S)
    back = "at the exporter's death" if at_death else "when the importer closed the peer"
    if not memory.came_back():
        back = "never"
        yield Problem(f"the dead exporter's memory was not free {END_S:g} s after the importer had closed the peer")
    columns = (
        Column("its memory came back"),
        Column("free while it lived", "GB", measured=True),
        Column("after its death", "GB", measured=True),
        Column("after the importer closed", "GB", measured=True),
        Column("seconds after closing", "s", measured=True),
    )
    row = memory.before / 1e9, held / 1e9, memory.now / 1e9, closed_s
    yield Table("free memory of the dead exporter's GPU", columns, [(back, *row)])


def _goes_on(setting: Setting, again: Importer, src: list[int], dst: list[int]) -> Iterator[Item]:
    """Checks that this process can still compute and pull from another peer: a CUDA context that a fault has broken
    fails at the next call.
    """
    ones = torch.ones(64, 64, device=setting.device)
    if not (ones @ ones == 64).all():
        yield Problem("the importer computes wrongly after its peer's death")
    again.pull_s(src, dst)
    if not again.holds(src, dst):
        yield Problem("a pull from another exporter brings other bytes")
    yield Note(
        "afterwards: the dead peer closed, a matmul computed, and a pull from another exporter, every byte compared"
    )
