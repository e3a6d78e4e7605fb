"""Kills the exporter during a pull. The pull must end, and the importer must live on and pull from another peer."""

import secrets
import time
from collections.abc import Iterator

import torch

from bench.gpu.device_exports import open_device
from bench.gpu.exporter import LEASE_ID, Exporter
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import SHARED_MEMORY, Setting
from bench.gpu.transfer import Importer
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.transport import Pending

END_S = 20.0
"""Longest wait for a pull to end after its exporter has died."""
NUM_ROUNDS = {"cuda_ipc": 4000}
"""How many times a pull copies the whole cache, for transports that copy it 60 times too fast to be interrupted."""


def run(setting: Setting, kind: str) -> Iterator[Item]:
    """The pull copies the whole cache many times, so that it takes long enough to be interrupted. In a rehearsal the
    fake device holds the pull until the exporter is gone.
    """
    num_rounds = setting.size(NUM_ROUNDS.get(kind, 60), 20)
    torch.manual_seed(setting.seed)
    num_blocks, block_bytes = setting.size((512, 2 << 20), (16, 1 << 16))
    first, second = (f"{SHARED_MEMORY}{secrets.token_hex(4)}" for _ in range(2))
    with Exporter(setting, first) as victim, Exporter(setting, second) as other:
        endpoints = [exporter.export(kind, num_blocks, block_bytes) for exporter in (victim, other)]
        src, dst = torch.randperm(num_blocks).tolist(), torch.randperm(num_blocks).tolist()
        device = open_device(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}")
        importer = Importer(setting, kind, device, endpoints[0], num_blocks, block_bytes)
        whole_s = importer.pull_s(src, dst)
        fake = device if isinstance(device, FakeDevice) else None
        if fake:
            fake.stall_after(1)
        pull = importer.peer.pull(src * num_rounds, dst * num_rounds)
        if fake and not fake.stalled.wait(END_S):
            yield Problem("the pull never reached its second copy")
        under_way, seconds = _kill_during(pull, victim, fake)
        ended = pull.poll()
        rows: list[tuple[Cell, ...]] = [
            ("under way when the exporter was gone", str(under_way)),
            ("ended by itself", str(ended)),
            ("its error", (pull.error or "none: all bytes came") if ended else "-"),
            ("the lease word still reads", str(importer.peer.read_word(0) == LEASE_ID)),
        ]
        yield Table(f"{kind}: the pull", (Column("what"), Column("found")), rows)
        yield Table(
            "its end",
            (Column("after the death", "s", measured=True), Column("one round before", "s", measured=True)),
            [(seconds, whole_s)],
        )
        if not under_way:
            yield Problem("the pull ended before the exporter did: nothing was tried")
        if not ended:
            yield Problem(f"the pull had not ended {END_S:g} s after the exporter's death")
            return
        importer.close()
        yield from _survives(setting)
        again = Importer(setting, kind, device, endpoints[1], num_blocks, block_bytes)
        again.pull_s(src, dst)
        if not again.holds(src, dst):
            yield Problem("a pull from another exporter brings other bytes")
        again.close()
        yield Note(
            "afterwards: the dead peer closed, a matmul computed, and a pull from another exporter, every byte compared"
        )


def _kill_during(pull: Pending, victim: Exporter, fake: FakeDevice | None) -> tuple[bool, float]:
    """Kills the exporter and waits for the pull's end, at most `END_S`. Returns whether the pull was still under way
    when the exporter was gone, and the seconds from then to its end.
    """
    victim.kill()
    killed_at = time.monotonic()
    under_way = not pull.poll()
    if fake:
        fake.resume()
    while not pull.poll() and time.monotonic() - killed_at < END_S:
        time.sleep(0.001)
    return under_way, time.monotonic() - killed_at


def _survives(setting: Setting) -> Iterator[Item]:
    """Checks that this process can still compute: a CUDA context that a fault has broken fails at the next call."""
    ones = torch.ones(64, 64, device=setting.device)
    if not (ones @ ones == 64).all():
        yield Problem("the importer computes wrongly after its peer's death")
