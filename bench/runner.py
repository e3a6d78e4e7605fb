"""Measures what a CPU engine's steps are made of, beside what this machine can do.

    python -m bench.runner [--json] [--model DIR] [--threads N]

First all linears of the model in bfloat16: ours, torch's in bfloat16 and torch's in float32. Then whole steps of the
runner in bfloat16. `floor` is the time that the machine needs at least: to read the stored weights at the read
bandwidth, or to multiply them at the speed of torch's float32 matmul, whichever is longer; both are measured in the
same run. Instructions that multiply bfloat16 directly can be faster than this floor. A step's floor is that of its
linears and its head; attention comes on top. Last comes attention alone, beside floors of its own (attention_cpu.py).

Everything takes turns and is repeated, and the fastest repeat of each layer and of each step counts, because other
programs may use the machine too. A GB is 1e9 bytes.
"""

import bench.engine_threads  # noqa: F401  before torch

# isort: split
import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench import attention_cpu
from bench.machine import ROUNDS_S, Fastest, Machine, Speeds, layer_weights, take_turns
from cluster.fetch import demo_model_dir
from engine.models.decoder import Decoder, Layer
from engine.models.loading import load_model
from engine.runner import Batch
from engine.runners.paged_cache import block_bytes
from engine.runners.torch_cpu import TorchCPURunner

ROWS = (1, 8, 32, 64, 512)
DECODES = (1, 8, 32)
"""Sequences of the measured decode steps, each with CONTEXT tokens."""
CONTEXT, PROMPT, BLOCK_SIZE = 256, 512, 16


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """Milliseconds for all linears of the layers."""

    rows: int
    ours_ms: float
    torch_bfloat16_ms: float
    torch_float32_ms: float
    floor_ms: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    step: str
    ms: float
    floor_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    machine: Machine
    linears: list[LinearTimes]
    steps: list[StepTimes]


@torch.inference_mode()
def run(ours: Decoder, bfloat16: Decoder, float32: Decoder, num_threads: int, *, rounds_s: float = ROUNDS_S) -> Figures:
    """`ours` and `bfloat16` are the same model; a runner fits the linears of the first."""
    config = ours.config
    runner = TorchCPURunner(ours, _cache(ours), block_size=BLOCK_SIZE, num_threads=num_threads)
    speeds = Speeds()
    passes = {rows: [Fastest(layer_calls(model, rows)) for model in (ours, bfloat16, float32)] for rows in ROWS}
    for times in passes.values():
        take_turns([*speeds.parts, *times], rounds_s)
    batches = {f"decode {n} x {CONTEXT}": _batch(n, CONTEXT, 1) for n in DECODES}
    batches[f"prompt of {PROMPT}"] = _batch(1, 0, PROMPT)
    steps = {name: Fastest([_step(runner, batch)]) for name, batch in batches.items()}
    take_turns([*speeds.parts, *steps.values()], rounds_s)
    machine, layers, head = speeds.machine(), layer_weights(config), config.vocab_size * config.hidden_size
    return Figures(
        machine,
        [
            LinearTimes(
                rows=rows,
                ours_ms=1000 * times[0].seconds,
                torch_bfloat16_ms=1000 * times[1].seconds,
                torch_float32_ms=1000 * times[2].seconds,
                floor_ms=1000 * machine.floor_s(layers, rows),
            )
            for rows, times in passes.items()
        ],
        [
            StepTimes(
                name,
                1000 * steps[name].seconds,
                1000 * (machine.floor_s(layers, batch.num_tokens) + machine.floor_s(head, len(batch.rows))),
            )
            for name, batch in batches.items()
        ],
    )


def layer_calls(model: Decoder, rows: int) -> list[Callable[[], object]]:
    """The linears of each layer."""
    config = model.config
    sizes = (config.hidden_size, config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size)
    hidden, attended, normed, gated = (torch.randn(rows, size).to(model.dtype) for size in sizes)

    def calls(layer: Layer) -> Callable[[], object]:
        def call() -> None:
            layer.qkv(hidden)
            layer.o(attended)
            layer.gate_up(normed)
            layer.down(gated)

        return call

    return [calls(layer) for layer in model.layers]


def _step(runner: TorchCPURunner, batch: Batch) -> Callable[[], object]:
    return lambda: runner.execute(batch)


def _cache(model: Decoder) -> torch.Tensor:
    num_blocks = 1 + max(DECODES) * (CONTEXT // BLOCK_SIZE + 1)
    return torch.zeros(num_blocks * block_bytes(model, BLOCK_SIZE), dtype=torch.uint8)


def _batch(num_sequences: int, computed: int, scheduled: int) -> Batch:
    blocks_each = -(-(computed + scheduled) // BLOCK_SIZE)
    blocks = np.arange(1, num_sequences * blocks_each + 1, dtype=np.int32)
    return Batch(
        step=0,
        rows=np.arange(num_sequences, dtype=np.int32),
        num_scheduled=np.full(num_sequences, scheduled, np.int32),
        num_computed=np.full(num_sequences, computed, np.int32),
        sample=np.ones(num_sequences, np.bool_),
        token_ids=np.full((num_sequences, computed + scheduled), 5, np.int32),
        block_tables=blocks.reshape(num_sequences, blocks_each),
    )


def table(figures: Figures) -> str:
    machine = figures.machine
    lines = [
        f"threads {machine.threads}: reads {machine.read_gb_s:.1f} GB/s, float32 {machine.float32_gflop_s:.0f} GFLOP/s",
        "",
        "linears of all layers, ms      ours  bfloat16   float32     floor   floor/ours   better of torch's/ours",
    ]
    for row in figures.linears:
        better = min(row.torch_bfloat16_ms, row.torch_float32_ms)
        lines.append(
            f"{row.rows:>6} rows           {row.ours_ms:>12.1f}{row.torch_bfloat16_ms:>10.1f}"
            f"{row.torch_float32_ms:>10.1f}{row.floor_ms:>10.1f}{row.floor_ms / row.ours_ms:>12.0%}"
            f"{better / row.ours_ms:>20.2f}"
        )
    lines += ["", "steps of the runner, ms        ours                         floor   floor/ours"]
    lines += [
        f"{step.step:<23}{step.ms:>12.1f}{step.floor_ms:>30.1f}{step.floor_ms / step.ms:>12.0%}"
        for step in figures.steps
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model_dir = arguments.model or demo_model_dir(lambda text: None)
    ours, bfloat16, float32 = (load_model(model_dir, dtype) for dtype in ("bfloat16", "bfloat16", "float32"))
    figures = run(ours, bfloat16, float32, arguments.threads)
    config, threads = ours.config, (arguments.threads,)
    attention = attention_cpu.rows(
        num_kv_heads=config.num_kv_heads, group=config.num_heads // config.num_kv_heads, head_dim=config.head_dim,
        threads=threads,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(asdict(figures) | {"attention": [row._asdict() for row in attention]}, indent=1))
        return
    print(f"{table(figures)}\n\n{attention_cpu.HEAD}")
    for row in attention:
        print(attention_cpu.line(row), flush=True)


if __name__ == "__main__":
    main()
