"""Sends 500 requests and cancels four of five at random. Afterwards all blocks are free and no process has grown."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from bench.soak import MAX_GROWTH_BYTES, Load, Report, config, idle_capacity, watched
from cluster.config import from_tree
from cluster.serve import Deployment
from tests.e2e.leftovers import none_left
from tests.hang import HANG_S
from twopass import AsyncClient

NUM_WARM_UP, NUM_REQUESTS, NUM_AT_ONCE = 500, 500, 100


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    events: SimpleQueue[str] = SimpleQueue()
    tree = config() | {"log_level": "debug", "transfer": {"checksum": True}}
    with none_left(), Deployment(from_tree(tree), events.put) as deployment, watched(deployment):
        yield deployment


async def storm(port: int, num_requests: int, seed: int) -> Counter[str]:
    """Sends `num_requests` requests, of which `NUM_AT_ONCE` are open at any time. Returns how they ended."""
    async with AsyncClient(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
        load = Load(client, seed, cancelled=0.8, longest_wait_s=0.6)
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def one() -> None:
            async with places:
                await load.one()

        async with asyncio.TaskGroup() as requests:
            for _ in range(num_requests):
                requests.create_task(one())
        return load.ends


def test_blocks_and_memory_return_to_the_baseline(deployment: Deployment) -> None:
    asyncio.run(storm(deployment.ports.grpc_port, NUM_WARM_UP, seed=1))
    before = idle_capacity(deployment)
    ends = asyncio.run(storm(deployment.ports.grpc_port, NUM_REQUESTS, seed=2))
    after = idle_capacity(deployment)
    growth = {name: (after.memory_bytes[name] - memory) / 2**20 for name, memory in before.memory_bytes.items()}
    print(f"{dict(ends)}; memory grew by {growth} MiB, allowed {MAX_GROWTH_BYTES / 2**20:g}")
    assert ends.total() == NUM_REQUESTS and ends["cancelled"] > NUM_REQUESTS / 2
    assert Report(0.0, before, after, dict(ends)).problems() == []
    assert all(load.hello.num_blocks - 1 == after.free_blocks[load.address.replica_id] for load in deployment.loads())
    (decode,) = (load.status for load in deployment.loads() if load.hello.role == "decode")
    assert decode is not None and decode.counters["pulls"] > 0 and decode.counters["checksum_failures"] == 0


def test_every_process_logs_lines_that_machines_read(deployment: Deployment) -> None:
    lines = list(logged(deployment))
    started = {line["replica"].partition("@")[0] for line in lines if line["message"] == "started"}
    assert started == {"router", "prefill-0", "decode-0"}
    accepted, ended = (
        sorted(line["request_id"] for line in lines if line["message"] == f"request {what}")
        for what in ("accepted", "ended")
    )
    assert accepted == ended and len(ended) > NUM_REQUESTS / 2, "some are given up before they are accepted"
    assert [line for line in lines if line["level"] in ("warning", "error")] == []


def logged(deployment: Deployment) -> Iterator[dict[str, Any]]:
    """Lines of the logs of all workers. They stand in the worker logs in the private Ray's folder."""
    assert deployment._ray.folder is not None
    for path in Path(deployment._ray.folder.path).glob("session_*/logs/worker-*.err"):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)
