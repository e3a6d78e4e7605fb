"""What a deployment may leave behind: processes, shared memory, folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Live processes below `pid`, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    grown = True
    while grown:
        below = {child for child, parent in parents.items() if (parent == pid or parent in found) and child not in found}
        found |= {child: _command(child) for child in below}
        grown = bool(below)
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def files() -> set[str]:
    """Shared-memory files and temporary folders of any deployment on this machine."""
    return {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("twopass-*")}


@contextmanager
def none_left() -> Iterator[None]:
    """Asserts at the end that no process below this one and no file is new. Other deployments must not start or stop meanwhile."""
    processes, before = descendants(os.getpid()), files()
    yield
    assert {pid: command for pid, command in descendants(os.getpid()).items() if pid not in processes} == {}
    assert files() - before == set()
