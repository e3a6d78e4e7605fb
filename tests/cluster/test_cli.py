"""The commands around the deployment: stop signals, and what is offered where the server packages are absent."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import StopRequest

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_serving_the_first_signal_asks_and_the_second_interrupts(stop: StopRequest, number: signal.Signals) -> None:
    stop.serving = True
    os.kill(os.getpid(), number)
    assert stop.asked
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # the clean-up is not interrupted


def test_while_starting_the_first_signal_interrupts(stop: StopRequest) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.asked


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "twopass", *args], cwd=ROOT, capture_output=True, text=True)


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
    assert result.stderr.replace("\n", " ").startswith("The server packages are not installed here.")


def test_client_commands_work_without_the_server() -> None:
    assert run_without_server("version").returncode == 0
    assert "Unavailable" in run_without_server("generate", "hello", "--server", "127.0.0.1:9").stderr
