"""The commands around the deployment: stop signals, and what is offered where the server packages are absent."""

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


def run_without_server(*args: str) -> "subprocess.CompletedProcess[str]":
    """`twopass` in an interpreter that finds no `cluster`."""
    code = "import sys; sys.modules['cluster'] = None; from twopass.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["serve", "demo", "replay"])
def test_server_commands_say_what_is_missing(command: str) -> None:
    result = run_without_server(command, "--set", "a=b")
    assert result.returncode == 2
    assert result.stderr.replace("\n", " ").startswith("The server packages are not installed here.")


def test_client_commands_work_without_the_server() -> None:
    assert run_without_server("version").returncode == 0
    assert "Unavailable" in run_without_server("generate", "hello", "--server", "127.0.0.1:9").stderr
