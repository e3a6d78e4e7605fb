"""`python -m simulator` as a process."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.leftovers import descendants


def test_sigterm_ends_its_workers_too() -> None:
    with subprocess.Popen([sys.executable, "-m", "simulator", "--seeds", "100000", "--processes", "2"]) as simulator:
        while not (workers := [pid for pid, command in descendants(simulator.pid).items() if "spawn_main" in command]):
            assert simulator.poll() is None
        simulator.send_signal(signal.SIGTERM)
    assert simulator.returncode == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
