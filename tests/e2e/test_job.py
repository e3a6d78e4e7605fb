"""A job of `ray job submit` on a given Ray serves, drains on `ray job stop`, and leaves the cluster as it was."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.runners.arithmetic_model import expected_tokens
from tests.e2e.command import command
from tests.e2e.leftovers import descendants, none_left, orphans, processes
from tests.hang import HANG_S
from twopass import Client

pytest.importorskip("aiohttp", reason="job submission needs ray[default]")
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HOST = "127.0.0.2"
"""An address on the loopback network. Ray would replace 127.0.0.1 by an outward address."""


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray that the test has started as an administrator would."""

    pid: int
    environment: dict[str, str]
    url: str
    address: str
    """Address of its GCS."""

    def job(self, *args: str) -> str:
        """Runs `ray job <args>`, which must succeed, and returns its output."""
        verb, *rest = args
        result = subprocess.run(
            [str(BIN / "ray"), "job", verb, "--address", self.url, *rest],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def follow(self, job_id: str) -> "subprocess.Popen[str]":
        command = [str(BIN / "ray"), "job", "logs", "--address", self.url, "--follow", job_id]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )


def free_ports(count: int) -> list[str]:
    """Distinct ports on which nobody listens now. They lie below the range that Ray gives to its workers."""
    found: list[str] = []
    for port in range(os.getpid() % 1000 + 8000, 10000):
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) and len(found) < count:
                found.append(str(port))
    return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ray-job-", dir="/tmp"))  # the path must be short: Unix sockets lie below it
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    names = (
        "port",
        "dashboard-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
    )
    ports = free_ports(len(names))
    options = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [
        str(BIN / "ray"),
        "start",
        "--head",
        "--block",
        f"--node-ip-address={HOST}",
        "--num-cpus=2",
        "--num-gpus=0",
        *options,
    ]
    command += [
        f"--dashboard-host={HOST}",
        f"--temp-dir={folder}",
        f"--object-store-memory={100 * 2**20}",
        "--min-worker-port=20000",
    ]
    command += ["--max-worker-port=20999"]
    with none_left(), ExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ending.callback(end, process)
        next_line(process, "Ray runtime started")
        yield Head(process.pid, environment, f"http://{HOST}:{ports[1]}", f"{HOST}:{ports[0]}")


def next_line(process: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """The first line of a process's output that matches. If none does, the test fails and shows the output."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if match := re.search(pattern, line):
            return match
    pytest.fail(f"no line matches {pattern!r} in:\n{said}")


def end(process: "subprocess.Popen[str]") -> None:
    """Ends a Ray by the pids of its processes, because other Rays may run on this machine."""
    below = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    for pid in below.keys() & {pid for pid, (_, line) in processes().items() if below.get(pid) == line}:
        os.kill(pid, signal.SIGKILL)


def submit_options() -> list[str]:
    """The options that the README gives people to copy."""
    (line,) = re.findall(r"^\$ ray job submit (.*) -- ", (ROOT / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line)


def test_a_job_serves_drains_and_leaves_nothing(head: Head) -> None:
    lying = orphans()
    sets = ["runner=arithmetic", "router.grpc_port=0", "router.metrics_port=0", "prefill.num_blocks=256"]
    sets += ["decode.num_blocks=1024", "decode.max_model_len=16000"]
    serve = ("python", "-m", "cluster", "serve", *(word for key in sets for word in ("--set", key)))
    head.job("submit", "--no-wait", "--submission-id", "twopass", *submit_options(), "--", *serve)
    log = head.follow("twopass")
    port = next_line(log, r"serving on 127\.0\.0\.1:(\d+)|warning: `ray job stop`")[1]
    assert port is not None, "it would be killed in its drain"
    prompt, num_tokens = [1, 2, 3], 12_000  # takes longer than the 3 s after which Ray kills by default
    with Client(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
        stream = client.generate(prompt_token_ids=prompt, max_tokens=num_tokens)
        got = next(stream).token_ids
        stopping = subprocess.Popen(
            [str(BIN / "ray"), "job", "stop", "--address", head.url, "twopass"], env=head.environment
        )
        got += [token_id for chunk in stream for token_id in chunk.token_ids]
    assert got == expected_tokens(prompt, num_tokens)
    assert stopping.wait() == 0
    next_line(log, "drained, stopping")
    log.communicate()
    assert "STOPPED" in head.job("status", "twopass").upper()
    assert orphans() == lying
    assert not [
        command
        for command in descendants(head.pid).values()
        if re.search("PrefillActor|DecodeActor|RouterActor", command)
    ]


def test_a_given_ray_that_dies_ends_the_command(head: Head) -> None:
    """Either our own look at the GCS ends the command, or Ray's client in the process does, whose raylet may end with
    the GCS before we have looked.
    """
    with command(**head.environment, RAY_ADDRESS=head.address) as serving:
        serving.await_serving()
        (gcs,) = [pid for pid, line in descendants(head.pid).items() if "/gcs_server" in line]
        os.kill(gcs, signal.SIGKILL)
        code = serving.process.wait(HANG_S)
        assert code in (1, 2)
        for pid, line in descendants(head.pid).items():  # a living Ray would have ended them
            if re.search("PrefillActor|DecodeActor|RouterActor", line):
                os.kill(pid, signal.SIGKILL)
        _, said = serving.ended()
    assert code == 1 or said.startswith(f"ClusterLost: the GCS at {head.address} has not answered for 5 s: ")
