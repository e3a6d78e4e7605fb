"""The server's commands: stop signals, what they print, and what is left where the server packages are absent."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.stop_request import StopRequest
from router.accounts import Accounts

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_serving_the_first_signal_asks_and_the_second_interrupts(
    stop: StopRequest, number: signal.Signals
) -> None:
    stop.serving = True
    os.kill(os.getpid(), number)
    assert stop.asked
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # the clean-up is not interrupted


def test_nothing_interrupts_what_is_to_end_anyway(stop: StopRequest) -> None:
    stop.ignore()
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_came_before_anybody_listened_is_heard(stop: StopRequest) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        stop.listen()


def test_while_starting_the_first_signal_interrupts(stop: StopRequest) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.asked


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "twopass", *args], cwd=ROOT, capture_output=True, text=True)


FOREIGN = ["/models/[/red]/[bold]x[/bold]", "a :warning: [link=http://x]y", "/a/very/long/path" * 20]
"""Texts that would break the output if they were read as markup or emoji codes, or cut to the terminal's width."""


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("::", "localhost:7, as on every interface"),
        ("router.lan", "router.lan:7"),
    ],
)
def test_serve_says_everything_as_it_is_on_one_line_each(host: str, address: str) -> None:
    """The deployment is a fake that only reports progress and is asked to stop at once."""
    code = """
import cluster.serve, json, os, signal, sys
from protocol.start_times import Phase
from router.config import Ports
class Deployment:
    ports = Ports(7, 9, 8)
    def __init__(self, config, progress):
        for text in json.loads(os.environ["TEXTS"]):
            progress(text)
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def watch(self): os.kill(os.getpid(), signal.SIGTERM)
    def drain(self, deadline_s): return 0
    def start_times(self): return {"router": [Phase("tokenizer", 1.0, 3.0, 0.5)]}
cluster.serve.Deployment = Deployment
from twopass.__main__ import main
main()
"""
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "--set",
        "runner=arithmetic",
        "--set",
        f"router.grpc_host={host}",
        "--set",
        "router.insecure=true",
        "--timings",
    ]
    environment = {**os.environ, "TEXTS": json.dumps(FOREIGN), "COLUMNS": "40"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = result.stderr.splitlines()
    assert (result.returncode, lines[: len(FOREIGN)]) == (0, FOREIGN), result.stderr
    assert f"serving on {address}; Ctrl-C drains" in lines
    assert "metrics on http://127.0.0.1:8/metrics" in lines
    timings = [line.split() for line in lines]
    assert ["router", "tokenizer", "0.00", "2.00", "2.00", "0.50"] in timings
    assert [row[:2] for row in timings if row[:1] == ["command"]][-2:] == [["command", "drain"], ["command", "stop"]]


def test_an_error_about_a_strange_path_is_one_line() -> None:
    path = f"/nowhere/[/red] :warning: {'x' * 200}"
    result = run("serve", "--set", f"model={path}")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"ModelError: {path}" in result.stderr


def test_the_plan_folds_and_cuts_nothing() -> None:
    command = [sys.executable, "-m", "twopass", "plan", "--set", "runner=arithmetic"]
    wide, narrow = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": columns}).stdout
        for columns in ("120", "24")
    )
    assert "max_num_seqs" in wide and "…" not in wide
    assert "…" not in narrow and narrow.count("\n") > wide.count("\n")


def test_plan_checks_the_machine() -> None:
    few, many = (
        run("plan", "--check", "--set", "runner=arithmetic", "--set", f"prefill.num_blocks={num}")
        for num in (64, 2**40)
    )
    assert (few.returncode, few.stdout) == (0, "this machine has what the deployment needs\n")
    assert many.returncode == 1 and re.match(r"/dev/shm: \d+ bytes of shared memory needed .*--shm-size", many.stdout)


def test_replay_writes_and_shows_the_steps(tmp_path: Path) -> None:
    recorded = ROOT / "tests" / "data" / "scheduler" / "t11_preempt_fcfs_cache.json"
    out = tmp_path / "steps.json"
    result = run("replay", str(recorded), "--out", str(out), "--pretty")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(out.read_text())) == len(json.loads(recorded.read_text())["oracle"]["steps"])
    assert result.stdout.startswith("step 0: ")


@pytest.mark.parametrize(("text", "message"), [('{"a":', "not JSON"), ("{}", "not a trace: it has no requests")])
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    result = run("replay", str(path))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def run_without_server(*args: str) -> "subprocess.CompletedProcess[str]":
    """`twopass` in an interpreter that finds no `cluster`."""
    code = "import sys; sys.modules['cluster'] = None; from twopass.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["serve", "plan", "demo", "replay"])
def test_server_commands_say_what_is_missing(command: str) -> None:
    result = run_without_server(command, "--set", "a=b")
    assert result.returncode == 2
    assert (
        result.stderr == "The server packages are not installed here. In the source tree: pip install -e '.[server]'\n"
    )


def test_client_commands_work_without_the_server() -> None:
    assert run_without_server("version").returncode == 0
    assert "Unavailable" in run_without_server("generate", "hello", "--server", "127.0.0.1:9").stderr


def test_a_fresh_token_is_known_to_whoever_reads_its_entry(tmp_path: Path) -> None:
    result = run("token", "alice")
    (fresh,) = re.findall(r": (\S+)$", result.stderr, re.MULTILINE)
    (path := tmp_path / "tokens.yaml").write_text(result.stdout)
    assert Accounts(path).authenticate(f"Bearer {fresh}").name == "alice"
    assert "name: 'a b' is not" in run("token", "a b").stderr
