"""Measures what pulls cost the steps of the GPU that they fill: products bound by memory, as decodes are, are timed
alone and while a pull is under way.
"""

import secrets
import time
from collections.abc import Iterator
from statistics import median

import torch

from bench.gpu.device_exports import open_device
from bench.gpu.exporter import Exporter
from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import GPU_TRANSPORTS, SHARED_MEMORY, Setting
from bench.gpu.timing import Stopwatch
from bench.gpu.transfer import Importer

NUM_PRODUCTS = 32
NUM_ROUNDS = {"cuda_ipc": 200}
"""How many times a pull copies the whole cache, for transports that copy it in a few milliseconds. Others copy it 10
times.
"""


def run(setting: Setting, gpu: int) -> Iterator[Item]:
    """The exporter sees GPU number `gpu`, the importer GPU 0."""
    num_blocks, block_bytes = setting.size((512, 2 << 20), (16, 1 << 12))
    width = setting.size(8192, 16)
    rows: list[tuple[Cell, ...]] = []
    with Exporter(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}", gpu) as exporter:
        device = open_device(setting, f"{SHARED_MEMORY}{secrets.token_hex(4)}")
        weights = torch.randn(width, width, dtype=setting.model_dtype, device=setting.device)
        x = torch.randn(16, width, dtype=setting.model_dtype, device=setting.device)

        def step() -> None:
            for _ in range(NUM_PRODUCTS):
                torch.mm(x, weights)
            if not setting.rehearsal:
                torch.cuda.synchronize()

        alone_s = Stopwatch(setting).wall_s(step)
        for kind in GPU_TRANSPORTS:
            endpoint = exporter.export(kind, num_blocks, block_bytes)
            importer = Importer(setting, kind, device, endpoint, num_blocks, block_bytes)
            blocks = list(range(num_blocks)) * setting.size(NUM_ROUNDS.get(kind, 10), 1)
            pull = importer.peer.pull(blocks, blocks)
            steps, started = [], time.perf_counter()
            while not pull.poll():
                begun = time.perf_counter()
                step()
                steps.append(time.perf_counter() - begun)
            gigabytes_s = len(blocks) * block_bytes / (time.perf_counter() - started) / 1e9
            importer.close()
            if pull.error:
                raise RuntimeError(f"{kind}: {pull.error}")
            beside_s = median(steps[:-1]) if len(steps) > 1 else None  # during the last one the pull has ended
            slower = None if beside_s is None else 100 * (beside_s / alone_s - 1)
            times = alone_s * 1000, None if beside_s is None else beside_s * 1000, slower, gigabytes_s, len(steps)
            rows.append((kind, *times))
    columns = (
        Column("transport"),
        Column("step alone", "ms", measured=True),
        Column("step beside a pull", "ms", measured=True),
        Column("slower by", "%", measured=True),
        Column("the pull", "GB/s", measured=True),
        Column("steps beside it", "steps", measured=True),
    )
    yield Table(f"{NUM_PRODUCTS} products with a matrix of {width} x {width} as a step", columns, rows)
    yield Note("each step waits for the device, and both are started by threads of one process, as in a decode engine")
