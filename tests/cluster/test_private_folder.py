"""The next supervisor removes what a killed one has left, but not what a live one uses."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster import ray_handles
from cluster.ray_handles import PrivateFolder
from protocol.errors import StartupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a supervisor that has died since would have left it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    path = tmp_path / f"twopass-{process.pid}-abc"
    (path / "session" / "logs").mkdir(parents=True)
    return path


def test_the_next_one_removes_what_the_dead_left(folder: Path) -> None:
    mine = PrivateFolder.create(folder.parent)
    assert not folder.exists()
    assert mine.path.is_dir()
    mine.remove()
    assert list(folder.parent.iterdir()) == []


def test_a_live_one_is_left_alone(tmp_path: Path) -> None:
    first, second = PrivateFolder.create(tmp_path), PrivateFolder.create(tmp_path)
    assert first.path.is_dir() and second.path.is_dir()
    first.remove()
    second.remove()


def test_a_lock_counts_more_than_a_pid_that_is_not_seen_here(folder: Path) -> None:
    """Containers may share /tmp and not see each other's processes."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    PrivateFolder.create(folder.parent).remove()
    assert folder.is_dir()
    os.close(fd)
    PrivateFolder.create(folder.parent).remove()
    assert not folder.exists()


def test_other_folders_are_not_ours(tmp_path: Path) -> None:
    for name in ("twopass-abc-def", "twopass-1", "other-99999999-abc"):
        (tmp_path / name).mkdir()
    (tmp_path / "twopass-99999999-file").touch()
    PrivateFolder.create(tmp_path).remove()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system", "/tmp/twopass-1-a")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(StartupError) as raised:
        PrivateFolder.create(tmp_path)
    assert str(raised.value) == f"{tmp_path}: Read-only file system; a private Ray keeps its sockets and logs there"


def test_so_is_shared_memory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_handles, "_SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(StartupError, match="none: cannot be written; Ray's object store and the KV caches lie there"):
        PrivateFolder.create(tmp_path)
    assert list(tmp_path.iterdir()) == []
