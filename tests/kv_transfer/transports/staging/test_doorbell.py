"""Waiting for another process without looking again and again."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.transports.staging.doorbell import Doorbell
from protocol.errors import PullFailed
from tests.hang import HANG_S
from tests.kv_transfer.processes import ROOT

RINGER = """
import mmap, sys
import numpy as np
from kv_transfer.transports.staging.doorbell import Doorbell
with open(sys.argv[1], "r+b") as file:
    doorbell = Doorbell(np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint32, 1))
print("ready", flush=True)
for _ in sys.stdin:
    doorbell.ring()
"""


def test_a_bell_that_was_rung_since_is_not_waited_for() -> None:
    doorbell = Doorbell(np.zeros(1, np.uint32))
    seen = doorbell.value
    doorbell.ring()
    doorbell.wait(seen, HANG_S)
    assert doorbell.value == seen + 1


def test_waiting_ends_after_its_time() -> None:
    doorbell = Doorbell(np.zeros(1, np.uint32))
    doorbell.wait(doorbell.value, 0.001)
    assert doorbell.value == 0


def test_the_count_wraps() -> None:
    word = np.array([2**32 - 1], np.uint32)
    Doorbell(word).ring()
    assert word[0] == 0


def test_another_process_wakes_a_waiting_thread(tmp_path: Path) -> None:
    path = tmp_path / "word"
    path.write_bytes(bytes(4096))
    doorbell = Doorbell(np.memmap(path, np.uint32, "r+", shape=(1,)))
    woken = threading.Event()

    def wait() -> None:
        while doorbell.value == 0:
            doorbell.wait(0, HANG_S)
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
        Doorbell(np.zeros(1, np.uint32))
