"""Runs `twopass` as people do: it has the right exit codes, one clear line per error, drains on SIGTERM and leaves
nothing behind.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.runners.arithmetic_model import expected_tokens
from tests.e2e.command import command
from tests.e2e.leftovers import descendants, none_left, session
from tests.hang import HANG_S
from twopass import Client, Unavailable

ROOT = Path(__file__).parents[2]
SERVE = (
    "serve",
    "--set",
    "runner=arithmetic",
    "--set",
    "router.metrics_port=0",
    "--set",
    "prefill.num_blocks=256",
    "--set",
    "decode.num_blocks=256",
)


DEAD_PROXY = dict.fromkeys(
    ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"), "http://127.0.0.1:9"
)
"""Proxy variables with an address where no proxy runs. No connection within this machine may use them."""


def twopass(*args: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, **DEAD_PROXY, "RAY_grpc_enable_http_proxy": "1"}
    environment.pop("no_proxy", None)
    return subprocess.Popen(
        [sys.executable, "-m", "twopass", *args], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    )


def failure(*args: str) -> str:
    """Runs a command that must end with exit code 2, and returns its standard error."""
    with none_left():
        process = twopass(*args)
        _, error = process.communicate()
    assert process.returncode == 2, error
    return error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--set", "decode.max_num_seq=3"],
            "ConfigError: decode.max_num_seq: no such key; did you mean decode.max_num_seqs?",
        ),
        (["--config", "/nowhere.yaml"], "ConfigError: /nowhere.yaml: No such file or directory"),
        (["--set", "model=/nowhere"], "ModelError: /nowhere"),
        (
            ["--set", "runner=arithmetic", "--set", "prefill.kv_cache_bytes=16"],
            "ConfigError: prefill.kv_cache_bytes: too few",
        ),
    ],
)
def test_a_wrong_configuration_ends_in_one_line(args: list[str], message: str) -> None:
    error = failure("serve", *args)
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_a_ray_that_cannot_be_joined_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    error = failure(*SERVE)
    assert re.search(r"starting Ray\nConfigError: RAY_ADDRESS: http://127.0.0.1:8265 names a dashboard.*\n$", error)


def test_no_server_is_said_in_one_line() -> None:
    error = failure("generate", "hello", "--server", "127.0.0.1:9")
    assert error.startswith("Unavailable: ")
    assert error.count("\n") == 1


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = failure(*SERVE, "--set", f"router.grpc_port={port}")
    assert f"CapacityError: grpc_port: 127.0.0.1:{port} is taken" in error
    assert "Traceback" not in error


def test_too_little_shared_memory_is_said_and_nothing_is_left() -> None:
    error = failure(*SERVE, "--set", "router.grpc_port=0", "--set", f"prefill.num_blocks={2**36}")
    assert re.search(r"StartupError: .*\n +/dev/shm: \d+ bytes .* needed for the KV caches, \d+ available", error)


def test_sigterm_to_every_process_drains_and_leaves_nothing() -> None:
    """The signal goes to all processes that the command has started: a service manager signals the whole cgroup, and
    Ctrl-C the process group.
    """
    num_requests, num_tokens = 24, 1500
    with command() as serving, ThreadPoolExecutor(num_requests) as clients:
        port = serving.await_serving()
        streaming = threading.Semaphore(0)

        def ask(client: Client, prompt: list[int]) -> list[int]:
            stream = client.generate(prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True)
            got = next(stream).token_ids
            streaming.release()
            return got + [token_id for chunk in stream for token_id in chunk.token_ids]

        with Client(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
            prompts = [[1, 2, number] for number in range(num_requests)]
            answers = [clients.submit(ask, client, prompt) for prompt in prompts]
            for _ in prompts:
                assert streaming.acquire(timeout=HANG_S)
            for pid in session(serving.process.pid):
                os.kill(pid, signal.SIGTERM)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.result() == expected_tokens(prompt, num_tokens)
        assert serving.ended() == (0, "drained, stopping")


def test_a_router_that_dies_in_the_drain_is_not_replaced() -> None:
    with none_left():
        process = twopass(*SERVE, "--set", "router.grpc_port=0", "--set", "decode.num_blocks=1024")
        assert process.stderr is not None
        try:
            port = next(
                match[1] for line in process.stderr if (match := re.search(r"serving on 127.0.0.1:(\d+)", line))
            )
            with Client(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
                stream = client.generate(prompt_token_ids=[1, 2, 3], max_tokens=8000)
                next(stream)
                process.send_signal(signal.SIGTERM)
                assert any("draining" in line for line in process.stderr)
                os.kill(
                    next(pid for pid, command in descendants(process.pid).items() if "RouterActor" in command),
                    signal.SIGKILL,
                )
                with pytest.raises(Unavailable):
                    stream.read()
            assert "stopping; the router died, what was open is lost" in process.stderr.read()
            assert process.wait() == 0
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
