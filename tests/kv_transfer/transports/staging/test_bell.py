"""Waiting for another process without looking again and again."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.transports.staging.bell import Bell
from protocol.errors import PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.processes import ROOT

RINGER = """
import mmap, sys
import numpy as np
from kv_transfer.transports.staging.bell import Bell
with open(sys.argv[1], "r+b") as file:
    bell = Bell(np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint32, 1))
print("ready", flush=True)
for _ in sys.stdin:
    bell.ring()
"""


def test_a_bell_that_was_rung_since_is_not_waited_for() -> None:
    bell = Bell(np.zeros(1, np.uint32))
    seen = bell.value
    bell.ring()
    bell.wait(seen, HANG_S)
    assert bell.value == seen + 1


def test_waiting_ends_after_its_time() -> None:
    bell = Bell(np.zeros(1, np.uint32))
    bell.wait(bell.value, 0.001)
    assert bell.value == 0


def test_the_count_wraps() -> None:
    word = np.array([2**32 - 1], np.uint32)
    Bell(word).ring()
    assert word[0] == 0


def test_another_process_wakes_a_waiting_thread(tmp_path: Path) -> None:
    path = tmp_path / "word"
    path.write_bytes(bytes(4096))
    bell = Bell(np.memmap(path, np.uint32, "r+", shape=(1,)))
    woken = threading.Event()

    def wait() -> None:
        while bell.value == 0:
            bell.wait(0, HANG_S)
        woken.set()

    command = [sys.executable, "-c", RINGER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        thread = threading.Thread(target=wait)
        thread.start()
        process.stdin.write("\n")
        process.stdin.flush()
        assert woken.wait(HANG_S)
        thread.join()
        process.stdin.close()


def test_machines_whose_futex_we_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    with pytest.raises(PullFailed, match="no futex is known for Linux on s390x"):
        Bell(np.zeros(1, np.uint32))
