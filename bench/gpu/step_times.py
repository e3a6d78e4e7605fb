"""Measures steps of an 8B-shaped model of random weights: decodes at several batch sizes, with and without graphs, and
whole prompts.
"""

import time
from collections.abc import Generator, Iterator

import numpy as np
import torch

from bench.gpu import compiled
from bench.gpu.models import BLOCK_SIZE, gpu_runner, large_model, make_cache
from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting
from bench.gpu.timing import Floors, Stopwatch, measure_floors
from engine.models.checkpoint import num_parameters
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.runner import Batch
from engine.runners.cuda import CUDARunner
from engine.runners.paged_cache import block_bytes


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    watch = Stopwatch(setting)
    floors = measure_floors(setting, watch)
    batches, context = setting.size((1, 8, 32, 64, 128), (1, 2)), setting.size(1024, 20)
    prompts, num_steps = setting.size((512, 2048, 8192), (8,)), setting.size(20, 2)
    model = large_model(setting)
    num_blocks = 1 + max(batches[-1] * (context // BLOCK_SIZE + 1), prompts[-1] // BLOCK_SIZE + 1)
    cache = make_cache(model, num_blocks)
    plain, graphs = yield from _started(model, cache, decode_batch(batches[-1], context, num_blocks), batches)
    columns = Column("decodes"), *_columns("no graph"), *_columns("graph"), Column("floor", "ms", measured=True)
    kv_bytes = context * block_bytes(model, BLOCK_SIZE) // BLOCK_SIZE
    weight_bytes = _weights(model.config) * model.dtype.itemsize
    rows: list[tuple[Cell, ...]] = []
    for size in batches:
        batch = decode_batch(size, context, num_blocks)
        floor_s = floors.least_s(weight_bytes + size * kv_bytes, 2 * size * _weights(model.config))
        rows.append(
            (
                size,
                *_decode_ms(plain, batch, watch, num_steps),
                *_decode_ms(graphs, batch, watch, num_steps),
                floor_s * 1000,
            )
        )
        if not (plain.execute(batch).token_ids == graphs.execute(batch).token_ids).all():
            yield Note(
                f"{size} decodes: not all of the tokens with a graph are those without: "
                "close calls between random logits, or worse"
            )
    title = _title(setting, model.config)
    yield Table(f"{title}, decodes at a context of {context}", columns, rows)
    prompt_rows = [_prompt_row(plain, n, num_blocks, floors, watch) for n in prompts]
    yield Table(f"{title}, whole prompts", PROMPT_COLUMNS, prompt_rows)
    yield Note(
        f"step: from the batch to its tokens on the host, median of {num_steps}; "
        "device: between its events, the same steps"
    )
    yield Note(
        "launched ahead: a step is launched before the one before it is waited for; "
        f"the time of {num_steps} such steps by {num_steps}"
    )
    yield Note(
        "floor: weights and the contexts' KV once over the measured copy; prompts: FLOPs of linears and attention "
        "over the measured matmul"
    )
    yield from compiled.variants(setting)


def _started(
    model: Decoder, cache: torch.Tensor, batch: Batch, graph_sizes: tuple[int, ...]
) -> Generator[Item, None, tuple[CUDARunner, CUDARunner]]:
    """Returns a runner without graphs and one with them. Yields how long it takes until each can compute, which is
    mostly compiling where nothing was compiled before.
    """
    runners: list[CUDARunner] = []
    rows: list[tuple[Cell, ...]] = []
    for name, sizes in (("no graph", ()), (f"graphs of {len(graph_sizes)} sizes", graph_sizes)):
        started = time.perf_counter()
        runner = gpu_runner(model, cache, sizes)
        built = time.perf_counter()
        runner.execute(batch)
        stepped = time.perf_counter()
        runner.execute(batch)
        rows.append((name, built - started, stepped - built, time.perf_counter() - stepped))
        runners.append(runner)
    columns = Column("runner"), *(Column(name, "s", measured=True) for name in ("built", "first step", "second step"))
    yield Table(f"start, in this order; steps of {len(batch.rows)} decodes", columns, rows)
    plain, graphs = runners
    return plain, graphs


PROMPT_COLUMNS = (
    Column("prompt", "tokens"),
    Column("step", "ms", measured=True),
    Column("device", "ms", measured=True),
    Column("floor", "ms", measured=True),
    Column("prompt speed", "tokens/s", measured=True),
)


def _columns(way: str) -> tuple[Column, ...]:
    return tuple(Column(f"{way}, {what}", "ms", measured=True) for what in ("step", "device", "launched ahead"))


def _title(setting: Setting, config: ModelConfig) -> str:
    return f"{num_parameters(config) / 1e9:.2f} B random weights, {str(setting.model_dtype).removeprefix('torch.')}"


def _decode_ms(runner: CUDARunner, batch: Batch, watch: Stopwatch, num_steps: int) -> tuple[float, float, float]:
    device: list[float] = []
    step_s = watch.wall_s(lambda: device.append(runner.execute(batch).seconds), num_steps)
    return step_s * 1000, float(np.median(device)) * 1000, _ahead_s(runner, batch, watch, num_steps) * 1000


def _ahead_s(runner: CUDARunner, batch: Batch, watch: Stopwatch, num_steps: int) -> float:
    def steps() -> None:
        before = runner.launch(batch)
        for _ in range(num_steps - 1):
            launched = runner.launch(batch)
            before.result()
            before = launched
        before.result()

    return watch.wall_s(steps, 3) / num_steps


def _prompt_row(runner: CUDARunner, length: int, num_blocks: int, floors: Floors, watch: Stopwatch) -> tuple[Cell, ...]:
    device: list[float] = []
    batch = prompt_batch(length, num_blocks)
    step_s = watch.wall_s(lambda: device.append(runner.execute(batch).seconds), 5)
    config = runner.model.config
    head = config.vocab_size * config.hidden_size  # computed for one token only
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (length * (length + 1) // 2)
    flops = 2 * length * (_weights(config) - head) + 2 * head + attention
    floor_s = floors.least_s(_weights(config) * runner.model.dtype.itemsize, flops)
    return length, step_s * 1000, float(np.median(device)) * 1000, floor_s * 1000, length / step_s


def _weights(config: ModelConfig) -> int:
    """Weights that a step reads. An embedding that is not the head too does not count: only tokens' rows are read."""
    return num_parameters(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def decode_batch(num_sequences: int, context: int, num_blocks: int) -> Batch:
    """A step in which every sequence decodes the last token of its `context`. The blocks are scattered."""
    return _batch(num_sequences, context - 1, 1, num_blocks)


def prompt_batch(length: int, num_blocks: int) -> Batch:
    return _batch(1, 0, length, num_blocks)


def _batch(num_sequences: int, num_computed: int, num_scheduled: int, num_blocks: int) -> Batch:
    random = np.random.default_rng(num_sequences)
    length = num_computed + num_scheduled
    per_sequence = -(-length // BLOCK_SIZE)
    blocks = 1 + random.permutation(num_blocks - 1)[: num_sequences * per_sequence].astype(np.int32)
    return Batch(
        step=0,
        rows=np.arange(num_sequences, dtype=np.int32),
        num_scheduled=np.full(num_sequences, num_scheduled, np.int32),
        num_computed=np.full(num_sequences, num_computed, np.int32),
        sample=np.ones(num_sequences, np.bool_),
        token_ids=random.integers(0, 90, (num_sequences, length), dtype=np.int32),
        block_tables=blocks.reshape(num_sequences, per_sequence),
    )
