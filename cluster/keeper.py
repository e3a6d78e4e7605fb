"""The keeper ends and removes what is left of a deployment when its supervisor ends in any way, SIGKILL included.

It is a process of its own. `Keeper` starts it, and the supervisor holds its standard input open:

    a byte on standard input      the keeper ends everything now and answers with a byte
    end of standard input         the supervisor is gone: the keeper ends everything, then itself

"Everything" is the private Ray's folder, each process that has a file below it open for writing, and the deployment's
files in shared memory. All processes of Ray write their logs below that folder from the moment they start. A given Ray
has no such folder: there the keeper waits until Ray has ended the engines.

The keeper imports only the standard library and takes 7 MB. It is nobody's child and has a session of its own, so it is
reached neither by a signal to the supervisor's process group nor by Ray's job manager, which also ends a job's
children. It ignores the signals that ask a process to stop.
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
"""Longest wait for a process that does not die, or for a given Ray to end what ran in it."""
LOOK_S = 0.02
"""Interval between two looks at what is left."""


class Keeper:
    """The keeper as its supervisor sees it. `folder` is the private Ray's, None for a given Ray."""

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
        process.wait()  # this process forks the keeper and exits at once
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._pidfd = os.pidfd_open(int.from_bytes(self._stdout.read(4), sys.byteorder))

    @property
    def alive(self) -> bool:
        return not _readable(self._pidfd, 0)

    def clean(self, timeout_s: float) -> bool:
        """Ends and removes everything. False if that took longer than `timeout_s`, or the keeper is dead."""
        try:
            self._stdin.write(b".")
        except BrokenPipeError:
            return False
        return _readable(self._stdout.fileno(), timeout_s) and bool(self._stdout.read(1))

    def end(self, timeout_s: float) -> None:
        """Lets the keeper end, and waits for that."""
        self._stdin.close()
        _readable(self._pidfd, timeout_s)
        self._stdout.close()
        os.close(self._pidfd)


def _readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` becomes readable in time; a pidfd does when its process ends."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
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
    """Goes on until a look finds nothing more, or `TIMEOUT_S` is over.

    A process that has started meanwhile is found by the next look. Without its folder Ray starts no more processes.
    """
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        ended = kill_writers(f"{folder}/", spare={supervisor, os.getpid()}) if folder else 0
        kept = sum(not _remove(path) for path in SHARED_MEMORY.glob(f"{prefix}*"))
        folder_exists = bool(folder) and os.path.exists(folder)
        if not (ended or kept or folder_exists):
            return
        if folder_exists:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_S)


def kill_writers(folder: str, spare: set[int]) -> int:
    """Kills each process that has a file below `folder` open for writing; returns how many. `folder` ends in "/"."""
    return sum(
        _kill_writer(pid, folder) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in spare
    )


def _kill_writer(pid: int, folder: str) -> bool:
    try:
        process = os.pidfd_open(pid)  # before its files are looked at: a pid may be reused
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
    """Files that a process has open for writing. Raises OSError if the process is gone or belongs to another user."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{fd}"
        try:
            if os.lstat(link).st_mode & stat.S_IWUSR:
                paths.append(os.readlink(link))
        except FileNotFoundError:  # the process has closed it meanwhile
            continue
    return paths


def _remove(path: Path) -> bool:
    """Removes a shared-memory file. False if its creator still lives, which holds a lock on it."""
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
