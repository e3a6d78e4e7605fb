"""Clients that stream from a deployment while its processes are killed, and checks of what must be true afterwards."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from cluster.config import from_tree
from cluster.serve import Deployment
from engine.runners.arithmetic_model import expected_tokens
from tests.e2e.leftovers import none_left
from tests.e2e.watched import Running, await_idle
from tests.hang import HANG_S
from twopass import Client

NUM_STREAMS = 60
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
POOL = {"replicas": 2, "max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 64}


class Asked(NamedTuple):
    """A request and its only right answer."""

    prompt: list[int]
    answer: list[int]


def drawn_sum(draw: random.Random) -> Asked:
    prompt = [draw.randrange(500) for _ in range(draw.choice((3, 16, 200)))]
    return Asked(prompt, expected_tokens(prompt, draw.randrange(50, 250)))


@contextmanager
def deployed(tree: dict[str, Any], **knobs: Any) -> Iterator[Running]:
    router = {"grpc_port": 0, "metrics_port": 0, "status_interval_s": 0.2, "max_attempts": 8, **tree.get("router", {})}
    events: SimpleQueue[str] = SimpleQueue()
    config = from_tree({**tree, "prefill": POOL | knobs, "decode": POOL | knobs, "router": router})
    with none_left(), Deployment(config, events.put) as deployment:
        running = Running(deployment, events)
        yield running
        running.close()


class Streams:
    """`NUM_STREAMS` clients, each of which sends one request after the other and checks every token."""

    def __init__(self, client: Client, draw: Callable[[random.Random], Asked]) -> None:
        self._draw = draw
        self.num_streaming = threading.Semaphore(0)
        """Released once by each client as soon as it has its first token."""
        self._client = client
        self._ending = threading.Event()

    def run(self, seed: int) -> int:
        """Sends requests until `end`, and returns how many were answered, completely and rightly. Errors of the client
        are raised.
        """
        random_numbers, num_answers = random.Random(seed), 0
        while not self._ending.is_set():
            asked = self._draw(random_numbers)
            got: list[int] = []
            for chunk in self._client.generate(
                prompt_token_ids=asked.prompt, max_tokens=len(asked.answer), ignore_eos=True
            ):
                if not got and not num_answers:
                    self.num_streaming.release()
                got += chunk.token_ids
            assert got == asked.answer
            num_answers += 1
        return num_answers

    def end(self) -> None:
        """Makes every client stop after its current request."""
        self._ending.set()


@contextmanager
def streaming(client: Client, draw: Callable[[random.Random], Asked] = drawn_sum) -> Iterator[list["Future[int]"]]:
    """All streams have begun when this yields; all have ended after it."""
    streams = Streams(client, draw)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        try:
            futures = [threads.submit(streams.run, seed) for seed in range(NUM_STREAMS)]
            for _ in range(NUM_STREAMS):
                assert streams.num_streaming.acquire(timeout=HANG_S)
            yield futures
        finally:
            streams.end()


def await_back(running: Running, name: str) -> None:
    """Waits until a killed process has been replaced and, if it is an engine, until the router has its `Hello`: before
    that, no request can go there.
    """
    while running.events.get(timeout=HANG_S) != f"{name} is back":
        continue
    deployment = running.deployment
    while name in ENGINES and deployment.actor(name).address not in {load.address for load in deployment.loads()}:
        continue


def assert_clean(running: Running) -> None:
    """Every engine is idle with all blocks free, and the only shared-memory files are those of two prefill engines."""
    await_idle(running.deployment)
    loads = running.deployment.loads()
    assert sorted(load.address.replica_id for load in loads) == sorted(ENGINES)
    for load in loads:
        assert load.in_flight == 0
        assert load.status is not None
        assert load.status.num_free_blocks == load.hello.num_blocks - 1
    assert len(list(Path("/dev/shm").glob(f"{running.deployment.prefix}*"))) == 2


def kill_every_engine(running: Running, draw: Callable[[random.Random], Asked]) -> None:
    """Kills every engine once under streams, none of which may notice. A new request is served meanwhile."""
    newcomer = draw(random.Random("newcomer"))
    for victim in ENGINES:
        with streaming(running.client, draw) as streams:
            os.kill(running.deployment.actor(victim).call("pid"), signal.SIGKILL)
            killed_at = time.monotonic()
            answer = running.client.generate_text(
                prompt_token_ids=newcomer.prompt, max_tokens=3, ignore_eos=True, priority=-1
            )
            print(f"{victim} was killed; a newcomer was served {time.monotonic() - killed_at:.1f} s later")
            assert answer.token_ids == newcomer.answer[:3]
        assert sum(stream.result() for stream in streams) >= NUM_STREAMS
        await_back(running, victim)
    assert_clean(running)
