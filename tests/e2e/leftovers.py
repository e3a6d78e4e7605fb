"""Finds what a deployment may leave behind: processes, shared memory and folders. Other deployments may run on the
machine at the same time.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHERS_S = 10.0
"""How long other deployments may need to remove what an engine left that they have killed, or to lock a new file. What
nobody owns stays for good: with its own processes and keepers gone, a deployment removes nothing any more.
"""


def processes() -> dict[int, tuple[int, str]]:
    """Live processes as pid -> (parent's pid, command line)."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if state != "Z":
                found[int(entry.name)] = int(parent), command
    return found


def descendants(pid: int) -> dict[int, str]:
    """Live processes below `pid`, with their command lines."""
    alive, found = processes(), {pid: ""}
    while below := {
        child: command for child, (parent, command) in alive.items() if parent in found and child not in found
    }:
        found |= below
    del found[pid]
    return found


def keepers(pid: int) -> dict[int, str]:
    """Live keepers of the supervisor `pid`. They are nobody's children, so they are not among its descendants."""
    return {
        keeper: command
        for keeper, (_, command) in processes().items()
        if "cluster/keeper.py" in command and f" {pid} " in command
    }


def session(leader: int) -> dict[int, str]:
    """Live processes of the session that `leader` leads or has led, such as those of a private Ray, and its keepers."""
    found = keepers(leader)
    for pid, (_, command) in processes().items():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                found[pid] = command
    return found


def files_of(leader: int, prefix: str) -> list[Path]:
    """Folders of the supervisor `leader` in /tmp, and files in shared memory that begin with `prefix`."""
    return [*Path("/tmp").glob(f"twopass-{leader}-*"), *Path("/dev/shm").glob(f"{prefix}*")]


def orphans() -> set[str]:
    """Shared-memory files whose creator is dead, and folders of private Rays whose supervisor is dead. Folders of this
    process count too.
    """
    others = {str(pid) for pid in processes() if pid != os.getpid()}
    memory = {str(path) for path in Path("/dev/shm").glob("twopass-*") if not _locked(path)}
    folders = {str(path) for path in Path("/tmp").glob("twopass-*-*") if path.name.split("-")[1] not in others}
    return memory | folders


def _locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return True
    return False


@contextmanager
def none_left() -> Iterator[None]:
    """Asserts at the end that there is no new process below this one, no new keeper of it and no new orphan."""
    running, lying = descendants(os.getpid()), orphans()
    yield
    assert {pid: command for pid, command in descendants(os.getpid()).items() if pid not in running} == {}
    assert keepers(os.getpid()) == {}
    until = time.monotonic() + OTHERS_S
    while (left := orphans() - lying) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == set(), f"new orphans: {sorted(left)}"
