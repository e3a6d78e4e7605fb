"""Measures how fast blocks move between two processes through shared memory.

    python -m bench.transfer [--json] [--busy]

Another process exports a cache, and this one pulls scattered blocks out of it with one thread. `memcpy` is one large
numpy copy between the same two buffers in this process, which alternates with the pulls. Figures are medians. A GB is
1e9 bytes, and each byte counts once.
"""

import argparse
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.exports import Export
from kv_transfer.layout import Blocks
from kv_transfer.segment import SharedSegment
from kv_transfer.transport import Peer
from kv_transfer.transports import shared_memory

CACHE_BYTES = 256 << 20
BLOCK_BYTES = (16 << 10, 64 << 10, 256 << 10)
NUM_REPEATS = 9


def export_until_stdin_ends(block_bytes: int) -> None:
    """Runs in the other process: exports a cache until standard input ends."""
    exported = Export(
        TransferConfig(transport=shared_memory.KIND),
        f"bench-{uuid.uuid4().hex[:12]}",
        block_bytes=block_bytes,
        num_blocks=CACHE_BYTES // block_bytes,
        num_words=1,
        num_peers=1,
    )
    exported.cache.tensor[:] = np.arange(block_bytes, dtype=np.uint8)
    print(exported.endpoint.decode(), flush=True)
    sys.stdin.read()
    exported.close()


@contextmanager
def exporter(block_bytes: int) -> Iterator[bytes]:
    """Starts an exporting process and yields its endpoint."""
    command = [sys.executable, "-m", "bench.transfer", "--export", str(block_bytes)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().encode()


@contextmanager
def busy_interpreter(busy: bool) -> Iterator[None]:
    """Runs a thread that never releases the interpreter lock by itself, as an engine that is busy in Python."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=spin)
    if busy:
        thread.start()
    yield
    ended.set()
    if busy:
        thread.join()


def pull_seconds(peer: Peer, ended: "queue.SimpleQueue[float]", src_blocks: list[int], dst_blocks: list[int]) -> float:
    """Seconds from the call until the last byte has arrived."""
    started = time.perf_counter()
    pull = peer.pull(src_blocks, dst_blocks)
    seconds = ended.get() - started
    assert pull.poll()
    assert not pull.error
    return seconds


def measure(block_bytes: int, busy: bool) -> dict[str, float]:
    """Measures one row of the report."""
    num_blocks = CACHE_BYTES // block_bytes
    rng = np.random.default_rng(0)
    source, destination = rng.permutation(num_blocks).tolist(), rng.permutation(num_blocks).tolist()
    ended: queue.SimpleQueue[float] = queue.SimpleQueue()
    cache: Blocks = np.ones((num_blocks, block_bytes), np.uint8)
    transport = shared_memory.import_into(KVCache.in_host_memory(cache), lambda: ended.put(time.perf_counter()))
    in_order = list(range(num_blocks))
    copies: dict[str, list[float]] = {"memcpy": [], "pull": [], "pull_in_order": []}
    with exporter(block_bytes) as endpoint:
        peer = transport.connect(endpoint)
        memory = SharedSegment.open(*_where(endpoint))
        works: dict[str, Callable[[], float]] = {
            "memcpy": lambda: _seconds(lambda: np.copyto(cache, memory.cache)),
            "pull": lambda: pull_seconds(peer, ended, source, destination),
            "pull_in_order": lambda: pull_seconds(peer, ended, in_order, in_order),
        }
        with busy_interpreter(busy):
            for _ in range(NUM_REPEATS):
                for name, work in works.items():
                    copies[name].append(CACHE_BYTES / work() / 1e9)
        assert np.array_equal(cache, memory.cache)
        peer.close()
    transport.close()
    speeds = {f"{name}_gb_s": round(statistics.median(values), 2) for name, values in copies.items()}
    return {
        "block_bytes": block_bytes,
        **speeds,
        "share_of_memcpy": round(speeds["pull_gb_s"] / speeds["memcpy_gb_s"], 3),
    }


def _where(endpoint: bytes) -> tuple[Path, bytes]:
    where = json.loads(endpoint)
    return Path(where["path"]), bytes.fromhex(where["nonce"])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--busy", action="store_true", help="beside a thread that keeps the Python interpreter busy")
    parser.add_argument("--export", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.export:
        export_until_stdin_ends(arguments.export)
        return
    rows = [measure(block_bytes, arguments.busy) for block_bytes in BLOCK_BYTES]
    if arguments.json:
        print(
            json.dumps(
                {"transport": shared_memory.KIND, "cache_bytes": CACHE_BYTES, "busy": arguments.busy, "pulls": rows}
            )
        )
        return
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
