"""The death of a process of Ray is noticed without asking Ray."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

from cluster.ray_parts import LOST_AFTER_S, GivenPart, GivenParts, PrivateParts

SLEEP = shutil.which("sleep")


def start(name: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Starts a child process and waits until its name in /proc is `name`."""
    assert SLEEP is not None
    program = folder / name
    program.unlink(missing_ok=True)
    shutil.copy(SLEEP, program)
    process = subprocess.Popen([program, "1000"])
    while Path("/proc", str(process.pid), "comm").read_text().strip() != name:
        assert process.poll() is None
    return process


def test_a_part_of_a_private_ray_that_dies_is_named(tmp_path: Path) -> None:
    other = start("raylet", tmp_path)  # it belongs to another Ray of this process
    parts = PrivateParts()
    assert parts.lost() == ""
    gcs, raylet = start("gcs_server", tmp_path), start("raylet", tmp_path)
    parts.look()
    other.kill()
    other.wait()
    assert parts.lost() == ""
    raylet.send_signal(signal.SIGKILL)
    while not (lost := parts.lost()):
        continue
    assert lost == "raylet of the private Ray died"
    gcs.kill()
    gcs.wait()
    assert parts.lost() == "gcs_server and raylet of the private Ray died"
    raylet.wait()
    parts.close()


def test_a_part_that_dies_before_the_first_look_is_seen(tmp_path: Path) -> None:
    parts = PrivateParts()
    gcs = start("gcs_server", tmp_path)
    gcs.kill()  # nobody collects its exit status
    parts.look()
    while not parts.lost():
        continue
    gcs.wait()
    parts.close()


def test_a_part_of_a_given_ray_is_lost_when_it_takes_no_connection_for_long() -> None:
    now = 100.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        parts = GivenParts((GivenPart("the GCS", "127.0.0.1", port, lambda: now),))
        now += 100.0
        assert parts.lost() == ""
    now += 2.0
    assert parts.lost() == "", "it may be back in a moment"
    now += LOST_AFTER_S
    assert parts.lost().startswith(f"the GCS at 127.0.0.1:{port} has not answered for 5 s: ")
