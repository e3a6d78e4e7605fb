"""What a deployment may leave behind: processes, shared memory, folders. Other deployments may run on the machine meanwhile."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def processes() -> dict[int, tuple[int, str]]:
    """Live processes: pid -> (parent's pid, command line)."""
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
    while below := {child: command for child, (parent, command) in alive.items() if parent in found and child not in found}:
        found |= below
    del found[pid]
    return found


def orphans() -> set[str]:
    """Shared-memory files whose creator is dead, and private Ray folders whose supervisor is; those of this process count as well."""
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
    """Asserts at the end that there is no new process below this one and no new orphan."""
    running, lying = descendants(os.getpid()), orphans()
    yield
    assert {pid: command for pid, command in descendants(os.getpid()).items() if pid not in running} == {}
    assert orphans() - lying == set()
