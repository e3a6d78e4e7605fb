"""The golden answers, and what this process makes of them; as a command, for a process whose CPU is made to look
smaller.

python -m tests.engine.golden FILE        writes (float32 answers, bfloat16 logits, float16 logits) there
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cluster.fetch import demo_model_dir
from engine.models.decoder import Decoder
from engine.models.loading import load_model
from engine.runner import Batch, StepOutput
from engine.runners.step_plan import StepPlan
from engine.runners.torch_cpu import TorchCPURunner
from tests.engine.runner_driver import generate

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
PROMPTS: list[list[int]] = [case["prompt_ids"] for case in CASES]
ANSWERS: list[list[int]] = [case["greedy_ids"] for case in CASES]
NUM_BLOCKS, BLOCK_SIZE = 64, 16


class RecordingRunner(TorchCPURunner):
    """Keeps the logits of every step: [number of sequences that sample, vocab_size] by row."""

    def __init__(self, model: Decoder) -> None:
        config = model.config
        block_bytes = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim * model.dtype.itemsize
        cache = torch.zeros(NUM_BLOCKS * block_bytes, dtype=torch.uint8)
        super().__init__(model, cache, block_size=BLOCK_SIZE, num_threads=1)
        self.logits: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(CASES))}
        self._latest: torch.Tensor | None = None

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        self._latest = super().forward(plan)
        return self._latest

    def execute(self, batch: Batch) -> StepOutput:
        output = super().execute(batch)
        if self._latest is not None:
            for row, logits in zip(batch.rows[batch.sample].tolist(), self._latest, strict=True):
                self.logits[row].append(logits)
        return output


def greedy_answers(model: Decoder, budget: int) -> list[list[int]]:
    runner = RecordingRunner(model)
    return generate(runner, PROMPTS, GOLDEN["n"], budget=budget, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def forced_logits(model: Decoder) -> torch.Tensor:
    """[P, vocab_size] before every token of the answers, one answer after the other; prompts in chunks, answers token
    by token.
    """
    runner = RecordingRunner(model)
    generate(runner, PROMPTS, GOLDEN["n"], budget=100, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, forced=ANSWERS)
    return torch.stack([logits for row in runner.logits.values() for logits in row])


def main(file: str) -> None:
    model_dir = demo_model_dir(print)
    print(torch.backends.cpu.get_cpu_capability())
    bfloat16, float16 = (forced_logits(load_model(model_dir, dtype)) for dtype in ("bfloat16", "float16"))
    torch.save((greedy_answers(load_model(model_dir, "float32"), 100), bfloat16, float16), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
