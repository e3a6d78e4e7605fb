"""Puts one prefill and one decode engine under load for a long time. Afterwards every block and nearly all memory must
be free again.

    python -m bench.soak [--minutes 10] [--seed 1] [--json]

1. Warm-up: a part of the load runs, so that caches, heaps and threads reach the size that they keep.
2. Idle: free blocks of every engine and memory of every process are noted.
3. Load: prompts of mixed lengths share beginnings. A third of the requests is cancelled at a random moment. Every token
   is checked.
4. Idle again: free blocks must be equal, memory may have grown by `MAX_GROWTH_BYTES`, and no process may have died.
   Otherwise the exit code is 1.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from bench.process import memory_bytes
from cluster.config import from_tree
from cluster.serve import Deployment
from engine.runners.arithmetic_model import expected_tokens
from protocol.messages import ROUTER_ID
from twopass.client import AsyncClient

NUM_CLIENTS = 24
MAX_WARM_UP_S = 60.0
MAX_GROWTH_BYTES = 32 * 1024**2
"""What one process may grow by between two idle moments: memory that allocators keep, timers that have not expired and
histories of bounded length.
"""
IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Free blocks and memory of a deployment in which nothing runs."""

    free_blocks: dict[str, int]
    """Number of free blocks by engine."""
    memory_bytes: dict[str, int]
    """Resident anonymous memory by process."""
    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    minutes: float
    start: Capacity
    end: Capacity
    answers: dict[str, int]
    """Number of requests by their end: complete or cancelled."""

    def problems(self) -> list[str]:
        """What has not come back, one sentence each."""
        found = []
        for name, pid in self.start.pids.items():
            if self.end.pids.get(name) != pid:
                found.append(f"{name} has died")
        for name, free in self.start.free_blocks.items():
            if self.end.free_blocks.get(name) != free:
                found.append(f"{name} has {self.end.free_blocks.get(name)} free blocks, {free} before")
        for name, before in self.start.memory_bytes.items():
            growth = self.end.memory_bytes.get(name, 0) - before
            if growth > MAX_GROWTH_BYTES:
                found.append(
                    f"{name} has grown by {growth / 2**20:.1f} MiB, at most {MAX_GROWTH_BYTES / 2**20:g} are allowed"
                )
        return found


def config(**pool: Any) -> dict[str, Any]:
    """The configuration of one prefill and one decode engine with the arithmetic runner on free ports. `pool` holds
    knobs of both engines.
    """
    pools = {
        name: {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 32, "num_blocks": 2048} | pool
        for name in ("prefill", "decode")
    }
    return {"runner": "arithmetic", **pools, "router": {"grpc_port": 0, "metrics_port": 0, "status_interval_s": 0.2}}


@contextmanager
def watched(deployment: Deployment) -> Iterator[None]:
    """Runs a thread that watches the deployment, as `twopass serve` does."""
    ending = threading.Event()

    def watch() -> None:
        while not ending.is_set():
            deployment.watch(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


class Load:
    """Sends requests whose answers are known, and counts how they end.

    Its methods raise AssertionError for a wrong token, and whatever the client raises.
    """

    def __init__(
        self, client: AsyncClient, seed: int, *, cancelled: float = 1 / 3, longest_wait_s: float = 1.0
    ) -> None:
        """`cancelled` is the share of requests that are cancelled after at most `longest_wait_s` if still open then."""
        self._client, self._random = client, random.Random(seed)
        self._cancelled, self._longest_wait_s = cancelled, longest_wait_s
        self._beginnings = [[self._random.randrange(32_000) for _ in range(300)] for _ in range(8)]
        self.ends: Counter[str] = Counter()

    async def one(self) -> None:
        """Sends one request and checks its answer."""
        draw = self._random
        prompt = draw.choice(self._beginnings)[: draw.choice((0, 16, 100, 300))] + [
            draw.randrange(32_000) for _ in range(draw.choice((1, 15, 200)))
        ]
        num_tokens = draw.choice((1, 20, 200))
        wait_s = draw.uniform(0.0, self._longest_wait_s) if draw.random() < self._cancelled else None
        got: list[int] = []
        stream = self._client.generate(prompt_token_ids=prompt, max_tokens=num_tokens)
        try:
            async with asyncio.timeout(wait_s), stream:
                async for chunk in stream:
                    got += chunk.token_ids
        except TimeoutError:
            self.ends["cancelled"] += 1
        else:
            assert len(got) == num_tokens, f"{len(got)} tokens of {num_tokens}"
            self.ends["complete"] += 1
        assert got == expected_tokens(prompt, len(got)), f"a wrong answer to {prompt[:4]}..."

    async def until(self, at: float) -> None:
        """Runs `NUM_CLIENTS` clients, each with one request after the other, until `time.monotonic()` is `at`."""

        async def client() -> None:
            while time.monotonic() < at:
                await self.one()

        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(client())


def idle_capacity(deployment: Deployment) -> Capacity:
    """Waits until every engine has said in two statuses that it holds nothing. Raises TimeoutError."""
    until, first = time.monotonic() + IDLE_TIMEOUT_S, dict[str, int]()
    while True:
        loads = deployment.loads()
        statuses = {load.address.replica_id: load.status for load in loads if load.status is not None}
        for load in loads:
            status = load.status
            if (
                status is None
                or load.in_flight
                or status.num_waiting + status.num_running + status.num_leases + status.num_pulls
            ):
                first.pop(load.address.replica_id, None)
            else:
                first.setdefault(load.address.replica_id, status.seq)
        if statuses and all(name in first and status.seq > first[name] for name, status in statuses.items()):
            break
        if time.monotonic() > until:
            raise TimeoutError(f"not idle after {IDLE_TIMEOUT_S:g} s: {loads}")
        time.sleep(0.05)
    pids = {name: int(deployment.actor(name).call("pid")) for name in (ROUTER_ID, *statuses)}
    memory = {name: memory_bytes(pid) for name, pid in pids.items()}
    return Capacity({name: status.num_free_blocks for name, status in statuses.items()}, memory, pids)


def soak(minutes: float, seed: int) -> Report:
    """Starts a deployment, puts it under load, and stops it."""

    async def load(seconds: float, seed: int) -> Counter[str]:
        async with AsyncClient(f"127.0.0.1:{deployment.ports.grpc_port}", timeout_s=60.0) as client:
            load = Load(client, seed)
            await load.until(time.monotonic() + seconds)
            return load.ends

    with Deployment(from_tree(config()), lambda text: print(text, file=sys.stderr)) as deployment, watched(deployment):
        asyncio.run(load(min(MAX_WARM_UP_S, 60 * minutes / 3), seed))
        start = idle_capacity(deployment)
        ends = asyncio.run(load(60 * minutes, seed + 1))
        return Report(minutes, start, idle_capacity(deployment), dict(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description="A long load; what it took must come back.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = soak(arguments.minutes, arguments.seed)
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        print(f"{report.minutes:g} minutes: {', '.join(f'{count} {end}' for end, count in report.answers.items())}")
        for name, before in report.start.memory_bytes.items():
            blocks = (
                f"{report.start.free_blocks[name]} -> {report.end.free_blocks.get(name)}"
                if name in report.start.free_blocks
                else ""
            )
            print(
                f"{name:12} memory {before / 2**20:6.1f} -> {report.end.memory_bytes.get(name, 0) / 2**20:6.1f} MiB   "
                f"free blocks {blocks}"
            )
    problems = report.problems()
    for problem in problems:
        print(f"not returned: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
