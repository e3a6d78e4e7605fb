"""Ends and removes what is left of a deployment when its supervisor ends, in whichever way: also by SIGKILL.

A process of its own, which `Keeper` starts and whose standard input the supervisor holds open:

    a byte on standard input      end everything now, and answer with a byte
    end of standard input         the supervisor is gone: end everything, and yourself

"Everything" is each process that writes to a file below the private Ray's folder (all of Ray's do, from their birth on:
their logs), that folder, and the deployment's files in shared memory. A given Ray has no such folder: there the keeper
waits until Ray has ended the engines.

It imports nothing but the standard library and takes 7 MB. It is nobody's child and in a session of its own, so neither
a signal to the supervisor's process group reaches it nor Ray's job manager, which ends a job's children too. Signals
that ask to stop it ignores.
"""

import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
TIMEOUT_S = 60.0
"""Longest wait for a process that does not die, or for a Ray that is not ours to end what ran in it."""
LOOK_S = 0.02
"""Between two looks."""


class Keeper:
    """The keeper as its supervisor sees it. `folder` None: a given Ray."""

    def __init__(self, prefix: str, folder: Path | None) -> None:
        command = [sys.executable, "-I", "-S", __file__, prefix, str(folder or ""), str(os.getpid())]
        process = subprocess.Popen(
            command,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        process.wait()  # the keeper itself is its child
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._pidfd = os.pidfd_open(int.from_bytes(self._stdout.read(4), sys.byteorder))

    @property
    def alive(self) -> bool:
        return not _readable(self._pidfd, 0)

    def clean(self, timeout_s: float) -> bool:
        """Everything is ended and removed; False: not within `timeout_s`, or the keeper is dead."""
        try:
            self._stdin.write(b".")
        except BrokenPipeError:
            return False
        return _readable(self._stdout.fileno(), timeout_s) and bool(self._stdout.read(1))

    def end(self, timeout_s: float) -> None:
        """Lets it end, and waits for that."""
        self._stdin.close()
        _readable(self._pidfd, timeout_s)
        self._stdout.close()
        os.close(self._pidfd)


def _readable(fd: int, timeout_s: float) -> bool:
    """Of a pidfd: whether its process has ended. Descriptors may exceed what `select` takes."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def main(prefix: str, folder: str, supervisor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    os.write(1, os.getpid().to_bytes(4, sys.byteorder))
    try:
        while os.read(0, 1):
            end_everything(prefix, folder, supervisor)
            os.write(1, b".")
    except BrokenPipeError:
        pass
    finally:
        end_everything(prefix, folder, supervisor)


def end_everything(prefix: str, folder: str, supervisor: int) -> None:
    """Until a look finds nothing. What has started meanwhile is found by the next; without its folder Ray starts
    nothing.
    """
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        ended = kill_writers(f"{folder}/", spare={supervisor, os.getpid()}) if folder else 0
        kept = sum(not _remove(path) for path in SHARED_MEMORY.glob(f"{prefix}*"))
        lies = bool(folder) and os.path.exists(folder)
        if not (ended or kept or lies):
            return
        if lies:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_S)


def kill_writers(folder: str, spare: set[int]) -> int:
    """Kills every process that has a file open for writing below `folder`, which ends in a slash; returns how many."""
    return sum(
        _kill_writer(pid, folder) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in spare
    )


def _kill_writer(pid: int, folder: str) -> bool:
    try:
        process = os.pidfd_open(pid)  # before the look: a pid may come to mean another process
    except OSError:
        return False
    try:
        if not any(path.startswith(folder) for path in _written(pid)):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(process)
    return True


def _written(pid: int) -> list[str]:
    """Files that a process has open for writing. Raises OSError if it is gone or not ours to look at."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{fd}"
        try:
            if os.lstat(link).st_mode & stat.S_IWUSR:
                paths.append(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
    return paths


def _remove(path: Path) -> bool:
    """False while its creator, which holds a lock on it, lives."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
