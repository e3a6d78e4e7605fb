"""`python -m simulator` as a process."""

import signal
import subprocess
import sys
import time

from tests.e2e.leftovers import descendants, processes
from tests.hang import HANG_S


def test_sigterm_ends_its_workers_too() -> None:
    with subprocess.Popen([sys.executable, "-m", "simulator", "--seeds", "100000", "--processes", "2"]) as simulator:
        while not (workers := {pid for pid, command in descendants(simulator.pid).items() if "spawn_main" in command}):
            assert simulator.poll() is None
        simulator.send_signal(signal.SIGTERM)
    assert simulator.returncode == 128 + signal.SIGTERM
    give_up_at = time.monotonic() + HANG_S
    while workers & processes().keys():  # a worker that had only just been started ends by itself, a moment later
        assert time.monotonic() < give_up_at, "workers outlive the command"
