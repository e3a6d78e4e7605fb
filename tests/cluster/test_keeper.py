"""The keeper ends and removes what a deployment leaves, when its supervisor asks and when it dies, and nothing else."""

import fcntl
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.keeper import Keeper
from tests.e2e.leftovers import keepers
from tests.hang import HANG_S

FOREVER = "import time; print(flush=True); time.sleep(1e6)"


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"keeper-test-{secrets.token_hex(4)}-"
    yield name
    for path in Path("/dev/shm").glob(f"{name}*"):
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    (path / "session" / "logs").mkdir(parents=True)
    return path


def writer(log: Path) -> "subprocess.Popen[bytes]":
    """A process that never ends by itself and has its log open for writing, as all processes of Ray have."""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-S", "-c", FOREVER], stdout=file)
    while not log.stat().st_size:
        assert process.poll() is None
    return process


def test_it_ends_who_writes_below_the_folder_and_removes_what_lies(folder: Path, prefix: str, tmp_path: Path) -> None:
    log = folder / "session" / "logs" / "worker.out"
    mine, other = writer(log), writer(tmp_path / "private.out")
    reader = subprocess.Popen([sys.executable, "-S", "-c", FOREVER], stdin=log.open(), stdout=subprocess.DEVNULL)
    memory = Path("/dev/shm", f"{prefix}prefill-0-1")
    memory.touch()
    keeper = Keeper(prefix, folder)
    assert keeper.alive
    assert mine.poll() is None
    assert keeper.clean(HANG_S)
    assert mine.wait() == -signal.SIGKILL
    assert not folder.exists()
    assert not memory.exists()
    assert keeper.alive
    keeper.end(HANG_S)
    for spared in (other, reader):
        assert spared.poll() is None
        spared.kill()
        spared.wait()
    assert keepers(os.getpid()) == {}


def test_it_spares_its_supervisor(folder: Path, prefix: str) -> None:
    with (folder / "driver.log").open("w"):
        keeper = Keeper(prefix, folder)
        assert keeper.clean(HANG_S)
    keeper.end(HANG_S)


def test_what_has_an_owner_is_left_to_it(prefix: str) -> None:
    """Shared memory that is still locked stays: in a given Ray its engine is ended by Ray."""
    memory = Path("/dev/shm", f"{prefix}prefill-0-1")
    memory.touch()
    fd = os.open(memory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    keeper = Keeper(prefix, None)
    assert not keeper.clean(0.2)
    assert memory.exists()
    os.close(fd)
    keeper.end(HANG_S)
    assert not memory.exists()


def test_it_outlives_signals_to_all_and_ends_after_its_supervisor(folder: Path, prefix: str) -> None:
    code = f"""if True:
        import os, signal
        from pathlib import Path
        from cluster.keeper import Keeper
        keeper = Keeper({prefix!r}, Path({str(folder)!r}))
        print(flush=True)
        signal.pause()
    """
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline()
    orphan = writer(folder / "raylet.out")
    (keeper,) = keepers(supervisor.pid)
    assert os.getsid(keeper) != supervisor.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(keeper, number)
    watched = os.pidfd_open(keeper)
    assert orphan.poll() is None
    os.killpg(supervisor.pid, signal.SIGKILL)
    assert orphan.wait(HANG_S) == -signal.SIGKILL
    os.waitid(os.P_PID, supervisor.pid, os.WEXITED)
    assert select.select([watched], [], [], HANG_S)[0]
    os.close(watched)
    assert not folder.exists()


def test_its_own_death_is_seen(folder: Path, prefix: str) -> None:
    keeper = Keeper(prefix, folder)
    (pid,) = keepers(os.getpid())
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([watched], [], [], HANG_S)[0]
    os.close(watched)
    assert not keeper.alive
    assert not keeper.clean(HANG_S)
    keeper.end(HANG_S)
