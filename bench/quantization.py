"""Measures what int8 weights save, and what they cost in accuracy, on the demo model.

    python -m bench.quantization [--json]

The bytes of weights that a decode step reads; the linears of all layers in the form that the runner gives them, on one
thread by its CPU time, the fastest of many calls of each layer, int8 and bf16 in turn; and how far the logits before
every golden token are from float32's, teacher-forced: their root mean square error without the part that is common to
all logits of a position, and the golden tokens that another one overtakes.
"""

import bench.engine_threads  # noqa: F401  before torch

# isort: split
import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import Fastest, layer_weights, take_turns
from bench.rounding import centred, teacher_forced
from bench.runner import layer_calls
from cluster.fetch import demo_model_dir
from engine.models.config import INT8_GROUP, Dtype, ModelConfig, Quantization
from engine.models.loading import load_model
from engine.runners.cpu_int8_linears import fit_int8_linears
from engine.runners.cpu_linears import fit_linears, one_thread

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden_smollm2.json"
ROWS = (1, 8, 32, 512)
ROUNDS_S = 5.0
FORMS: tuple[tuple[Dtype, Quantization], ...] = (("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"))


@dataclass(frozen=True, slots=True)
class Bytes:
    """Weights of one decode step, without norms and biases."""

    linears: int
    int8_linears: int
    head: int


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds for the linears of all layers."""

    rows: int
    bfloat16_ms: float
    int8_ms: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """From float32's logits, before the golden tokens."""

    rms: float
    largest: float
    num_tokens: int
    unlike: int
    """Golden tokens that are not the likeliest."""
    led_by: float
    """The largest lead, in float32, of a golden token over the one that overtakes it."""


def divergence(logits: torch.Tensor, float32: torch.Tensor, golden: Sequence[int]) -> Divergence:
    """logits, float32: [P, vocab_size] before each of P tokens."""
    errors, chosen, tokens = centred(logits - float32), logits.argmax(1, keepdim=True), torch.tensor(golden)[:, None]
    lead = (float32.gather(1, tokens) - float32.gather(1, chosen))[chosen != tokens]
    return Divergence(
        errors.square().mean().sqrt().item(),
        errors.abs().max().item(),
        len(tokens),
        len(lead),
        max(lead.tolist(), default=0.0),
    )


def weight_bytes(config: ModelConfig) -> Bytes:
    """Of bf16 weights, and of int8 ones with their float16 scales."""
    num = layer_weights(config)
    return Bytes(2 * num, num + 2 * num // INT8_GROUP, 2 * config.vocab_size * config.hidden_size)


@torch.inference_mode()
def times(model_dir: Path) -> list[Times]:
    models = [load_model(model_dir, "bfloat16", quantization=quantization) for quantization in ("none", "int8")]
    with one_thread():
        for model in models:
            fit_linears(model, 1)
            fit_int8_linears(model, 1)
        found = []
        for rows in ROWS:
            measured = [Fastest(layer_calls(model, rows), time.thread_time) for model in models]
            take_turns(measured, ROUNDS_S)
            found.append(Times(rows, *(1000 * each.seconds for each in measured)))
    return found


def divergences(model_dir: Path) -> dict[str, Divergence]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    prompts, answers = [case["prompt_ids"] for case in cases], [case["greedy_ids"] for case in cases]
    float32 = teacher_forced(load_model(model_dir, "float32"), prompts, answers)
    found = {}
    for dtype, quantization in FORMS:
        logits = teacher_forced(load_model(model_dir, dtype, quantization=quantization), prompts, answers)
        found[f"{dtype}, quantization {quantization}"] = divergence(
            logits, float32, [token for answer in answers for token in answer]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    as_json: bool = parser.parse_args().json
    model_dir = demo_model_dir(lambda text: None)
    model = load_model(model_dir, "bfloat16")
    num_bytes, rows, found = weight_bytes(model.config), times(model_dir), divergences(model_dir)
    if as_json:
        figures = {"bytes": asdict(num_bytes), "linears": [asdict(row) for row in rows]}
        print(json.dumps({**figures, "logits": {name: asdict(each) for name, each in found.items()}}, indent=1))
        return
    print(
        f"linears {num_bytes.linears / 1e6:.1f} MB, in int8 {num_bytes.int8_linears / 1e6:.1f} MB; "
        f"head {num_bytes.head / 1e6:.1f} MB\n\nlinears of all layers, ms    bfloat16      int8   bfloat16/int8"
    )
    for row in rows:
        ratio = row.bfloat16_ms / row.int8_ms
        print(f"{row.rows:>6} rows {row.bfloat16_ms:>24.2f}{row.int8_ms:>10.2f}{ratio:>16.2f}")
    print("\nlogits beside float32's               rms   largest   other tokens   led by at most")
    for name, each in found.items():
        print(
            f"{name:<30}{each.rms:>11.4f}{each.largest:>10.3f}{each.unlike:>7} of {each.num_tokens}{each.led_by:>17.3f}"
        )


if __name__ == "__main__":
    main()
