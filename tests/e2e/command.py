"""Runs `twopass serve` as a process that leads a session, so that tests can signal it and see what it leaves."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.leftovers import files_of, keepers, session
from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]
SERVE = (
    *("serve", "--set", "runner=arithmetic", "--set", "router.grpc_port=0", "--set", "router.metrics_port=0"),
    *("--set", "prefill.num_blocks=256", "--set", "decode.num_blocks=2048"),
)
LOOK_S = 0.01


class Command:
    """A running `twopass serve`. `await_line` reads lines of its standard error, and `ended` reads the rest."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twopass", *SERVE],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.prefix = ""
        """Prefix of its files in shared memory, known once its keeper has been seen."""

    def await_line(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if match := re.search(pattern, line):
                self._see_keeper()
                return match
        raise AssertionError(f"no line matches {pattern!r} in:\n{said}")

    def await_serving(self) -> int:
        """Waits until it serves, and returns its port."""
        return int(self.await_line(r"serving on 127\.0\.0\.1:(\d+);")[1])

    def await_part(self, name: str) -> int:
        """Waits for a process of its private Ray to appear, and returns the pid."""
        while True:
            assert self.process.poll() is None
            for pid, command in session(self.process.pid).items():
                if command.split(" ")[0].endswith(f"/{name}"):
                    self._see_keeper()
                    return pid
            time.sleep(LOOK_S)

    def ended(self) -> tuple[int, str]:
        """Waits for its end and until nothing is left. Returns the exit code and the last line of standard error."""
        code = self.process.wait(HANG_S)
        said = self.process.stderr.read() if self.process.stderr is not None else ""
        until = time.monotonic() + HANG_S
        while session(self.process.pid) or files_of(self.process.pid, self.prefix):
            assert time.monotonic() < until, (session(self.process.pid), files_of(self.process.pid, self.prefix))
            time.sleep(LOOK_S)
        assert "Traceback" not in said
        return code, said.strip().rpartition("\n")[2]

    def _see_keeper(self) -> None:
        for command in keepers(self.process.pid).values():
            self.prefix = next(word for word in command.split(" ") if word.startswith("twopass-"))


@contextmanager
def command(**environment: str) -> Iterator[Command]:
    """Starts the command. At the end its session is killed, whatever the test has found."""
    running = Command(environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
        for pid in session(running.process.pid):
            os.kill(pid, signal.SIGKILL)
