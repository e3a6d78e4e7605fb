"""Each process knows what it did when while it started."""

import subprocess
import sys
import time

CODE = """
import time
from protocol import start_times
start_times.note_imports()
with start_times.phase("weights"):
    pass
with start_times.phase("weights"):  # again, which is no part of the start
    pass
try:
    with start_times.phase("kernels"):
        raise ValueError
except ValueError:
    pass
for phase in start_times.phases():
    assert phase.cpu_s >= 0
    print(phase.name, phase.began_at, phase.ended_at)
"""


def test_phases_are_noted_once_and_on_a_clock_that_processes_share() -> None:
    before = time.monotonic()
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    after = time.monotonic()
    phases = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, _, _ in phases] == ["process", "imports", "weights"]
    times = [float(value) for _, *pair in phases for value in pair]
    assert times == sorted(times)
    tick_s = 0.02  # /proc rounds when a process began
    assert before - tick_s <= times[0] and times[-1] <= after
