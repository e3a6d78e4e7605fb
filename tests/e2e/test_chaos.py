"""Processes are killed while sixty answers stream. No client notices a killed engine. A killed router ends every answer
with one clear error.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from engine.runners.arithmetic_model import expected_tokens
from tests.e2e.leftovers import descendants
from tests.e2e.streams import NUM_STREAMS, assert_clean, await_back, deployed, drawn_sum, kill_every_engine, streaming
from tests.e2e.watched import Running
from tests.hang import HANG_S
from twopass import Client, Unavailable


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed({"runner": "arithmetic"}, num_blocks=2048, stall_timeout_s=10.0) as running:
        yield running


def test_every_engine_is_killed_once_and_no_stream_notices(running: Running) -> None:
    kill_every_engine(running, drawn_sum)


def test_an_engine_that_freezes_is_replaced_and_no_stream_notices(running: Running) -> None:
    with streaming(running.client) as streams:
        os.kill(running.deployment.actor("decode-1").call("pid"), signal.SIGSTOP)
    assert sum(stream.result() for stream in streams) >= NUM_STREAMS
    await_back(running, "decode-1")
    assert_clean(running)


def test_a_killed_router_ends_its_streams_and_comes_back_on_its_port(running: Running) -> None:
    port, epoch = running.deployment.ports.grpc_port, running.deployment.actor("router").address.epoch
    router = next(pid for pid, command in descendants(os.getpid()).items() if "RouterActor" in command)
    with streaming(running.client) as streams:
        killed_at = time.monotonic()
        os.kill(router, signal.SIGKILL)
        for stream in streams:
            assert isinstance(stream.exception(), Unavailable)
        await_back(running, "router")
        print(f"the router was back after {time.monotonic() - killed_at:.1f} s")
    assert running.deployment.ports.grpc_port == port
    assert running.deployment.actor("router").address.epoch > epoch
    with Client(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
        until_served(client)
    print(f"and served after {time.monotonic() - killed_at:.1f} s")
    assert_clean(running)


def until_served(client: Client) -> None:
    """A new router refuses requests until it has the `Hello` of a decode engine, which takes a message each way."""
    while True:
        try:
            assert client.generate_text(prompt_token_ids=[1, 2], max_tokens=3).token_ids == expected_tokens([1, 2], 3)
        except Unavailable:
            continue
        return
