"""The two sides of a transfer in tests: an exporter in a process of its own, and a pulling side that waits for ends,
not for time.
"""

import queue
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_transfer.segment import DIRECTORY, PREFIX, remove_stale
from kv_transfer.transport import Pending
from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]


def content(num_blocks: int, block_bytes: int) -> np.ndarray:
    """What lies in every exported cache, uint8 [num_blocks, block_bytes]."""
    return np.random.default_rng(1).integers(0, 256, (num_blocks, block_bytes), np.uint8)


@contextmanager
def unused_name() -> Iterator[str]:
    """A name no other test uses; what lies under it afterwards is a leak, but for what a killed process could not take
    away.
    """
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    remove_stale(f"{PREFIX}{name}")
    assert list(DIRECTORY.glob(f"{PREFIX}{name}*")) == []


class Exporter:
    """Runs a module that prints its endpoint, then answers each line with a line."""

    def __init__(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = self._line().encode()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=HANG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Ends:
    """What a transport notifies: one entry per pull that has ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self) -> None:
        self._queue.put(None)

    def wait(self) -> None:
        """Waits for the next end."""
        self._queue.get(timeout=HANG_S)

    def of(self, pull: Pending) -> str:
        """Waits for the next end, which must be this pull's; its error."""
        self.wait()
        assert pull.poll()
        return pull.error
