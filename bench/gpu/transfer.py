"""Measures how fast blocks move between two processes, on one GPU or on one each, by block size and transport. Compares
every byte.
"""

import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median

import numpy as np
import torch

from bench.gpu.device_exports import as_tensor, importing, open_device
from bench.gpu.exporter import Exporter, content
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import GPU_TRANSPORTS, SHARED_MEMORY, Setting
from kv_transfer.device.device import Device
from kv_transfer.device.device_pool import DevicePool, DeviceStream
from kv_transfer.segment import NONCE_BYTES
from kv_transfer.transport import Peer
from protocol.arrays import Int64

NUM_REPEATS = 5
MAX_BLOCKS = 16384


class Importer:
    """The pulling side of one export."""

    def __init__(
        self, setting: Setting, kind: str, device: Device, endpoint: bytes, num_blocks: int, block_bytes: int
    ) -> None:
        self._ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._resources = ExitStack()
        self._pool = DevicePool(device, bytes(NONCE_BYTES), num_blocks=num_blocks, block_bytes=block_bytes)
        self._resources.callback(self._pool.close)
        self._transport = importing(kind, setting, self._pool.cache, lambda: self._ended.put(time.perf_counter()))
        self._resources.callback(self._transport.close)
        self.peer: Peer = self._transport.connect(endpoint)

    def pull_s(self, src: list[int], dst: list[int]) -> float:
        """Seconds from the call until the last byte has arrived. Raises RuntimeError if the pull fails."""
        started = time.perf_counter()
        pull = self.peer.pull(src, dst)
        seconds = self._ended.get() - started
        if pull.error:
            raise RuntimeError(f"{self._transport.name}: {pull.error}")
        return seconds

    def holds(self, src: list[int], dst: list[int]) -> bool:
        """Whether the blocks `dst` here have the content of the blocks `src` there."""
        cache = as_tensor(self._pool.cache.tensor).view(torch.int64)
        expected = content(self._pool.cache.num_blocks, self._pool.cache.block_bytes, cache.device)
        return torch.equal(
            cache[torch.tensor(dst, device=cache.device)], expected[torch.tensor(src, device=cache.device)]
        )

    def close(self) -> None:
        self._resources.close()


def run(setting: Setting, gpu: int) -> Iterator[Item]:
    """The exporter sees GPU number `gpu`, the importer GPU 0."""
    torch.manual_seed(setting.seed)
    cache_bytes = setting.size(1 << 30, 1 << 15)
    sizes = setting.size((16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20), (4096, 8192))
    rows: list[tuple[Cell, ...]] = []
    with Exporter(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}", gpu) as exporter:
        device = open_device(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}")
        for kind in GPU_TRANSPORTS:
            for block_bytes in sizes:
                num_blocks = min(cache_bytes // block_bytes, MAX_BLOCKS)
                importer = Importer(
                    setting, kind, device, exporter.export(kind, num_blocks, block_bytes), num_blocks, block_bytes
                )
                src, dst, in_order = (
                    torch.randperm(num_blocks).tolist(),
                    torch.randperm(num_blocks).tolist(),
                    list(range(num_blocks)),
                )
                neighbours_s = median(importer.pull_s(in_order, in_order) for _ in range(NUM_REPEATS))
                scattered_s = median(importer.pull_s(src, dst) for _ in range(NUM_REPEATS))
                equal, gigabytes = importer.holds(src, dst), num_blocks * block_bytes / 1e9
                importer.close()
                rows.append(
                    (kind, block_bytes >> 10, num_blocks, gigabytes / scattered_s, gigabytes / neighbours_s, str(equal))
                )
                if not equal:
                    yield Problem(f"{kind}, blocks of {block_bytes} bytes: not the bytes of the peer")
        if not gpu:
            yield _copies(setting, device, sizes)
        yield from _auto(setting, exporter, device, cache_bytes // sizes[-1], sizes[-1])
    columns = (
        Column("transport"),
        Column("block", "KiB"),
        Column("blocks"),
        Column("scattered", "GB/s", measured=True),
        Column("neighbours", "GB/s", measured=True),
        Column("bytes equal"),
    )
    yield Table(f"pulls of {cache_bytes >> 10} KiB, of {MAX_BLOCKS} blocks at most", columns, rows)
    yield Note(
        f"from the call until the pull is terminal, median of {NUM_REPEATS}; each byte counted once; "
        + (f"from GPU {gpu} to GPU 0" if gpu else "both processes on one GPU")
    )
    yield Note(
        "neighbours: one run of ascending ids; "
        "over cuda_ipc runs below 64 KiB are moved by a kernel, others by copy engines"
    )


def _copies(setting: Setting, device: Device, sizes: Sequence[int]) -> Table:
    """What copies within the importer's GPU take: started by a call each, and all by one call where the driver has
    batches.
    """
    num_copies = setting.size(256, 2)
    rows: list[tuple[Cell, ...]] = []
    for num_bytes in sizes:
        pool = DevicePool(device, bytes(NONCE_BYTES), num_blocks=2 * num_copies, block_bytes=num_bytes)
        srcs = pool.cache.pointer + num_bytes * np.arange(num_copies, dtype=np.int64)
        dsts = srcs + num_copies * num_bytes

        def one_by_one(stream: DeviceStream, srcs: Int64 = srcs, dsts: Int64 = dsts, size: int = num_bytes) -> None:
            for dst, src in zip(dsts.tolist(), srcs.tolist(), strict=True):
                stream.copy(dst, src, size)

        def at_once(stream: DeviceStream, srcs: Int64 = srcs, dsts: Int64 = dsts, size: int = num_bytes) -> None:
            stream.copy_many(dsts, srcs, np.full_like(srcs, size))

        with DeviceStream(device) as stream:
            ways = [_start_and_end(stream, start) for start in (one_by_one, at_once)]
        pool.close()
        gigabytes = num_copies * num_bytes / 1e9
        times = [(begun / num_copies * 1e6, gigabytes / ended) for begun, ended in ways]
        rows.append((num_bytes >> 10, *times[0], *times[1]))
    columns = (
        Column("copy", "KiB"),
        Column("a call each, starting one", "us", measured=True),
        Column("a call each, speed", "GB/s", measured=True),
        Column("one call, starting one", "us", measured=True),
        Column("one call, speed", "GB/s", measured=True),
    )
    return Table(f"{num_copies} copies within one GPU", columns, rows)


def _start_and_end(stream: DeviceStream, start: Callable[[DeviceStream], None]) -> tuple[float, float]:
    """Medians of the seconds until all copies have started, and until they have ended."""
    begun, ended = [], []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        start(stream)
        begun.append(time.perf_counter() - started)
        stream.drain()
        ended.append(time.perf_counter() - started)
    return median(begun), median(ended)


def _auto(setting: Setting, exporter: Exporter, device: Device, num_blocks: int, block_bytes: int) -> Iterator[Item]:
    """Yields notes about the transport that `auto` chooses here, and why."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kv_transfer.select")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    Importer(setting, "auto", device, exporter.export("auto", num_blocks, block_bytes), num_blocks, block_bytes).close()
    logger.removeHandler(handler)
    yield from (Note(f"auto: {line}") for line in lines)
