"""Measures the CPU time of one schedule and commit: `python -m bench.scheduler_time --json`.

Figures are medians in microseconds of this thread's CPU time. The prefix cache is on and blocks have 16 tokens. Each
step writes its block tables and builds the arrays of its `StepTokens`. The loads are:

decode      every running sequence takes one token
mixed       256 seats are kept full: a prompt of 64 to 1,024 tokens arrives when an answer of 64 to 192 tokens ends
preemption  the same as mixed, with too few KV blocks
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.messages import RequestKey, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
EOS = 2


class Load:
    """Makes requests with random prompts and random lengths of their answers."""

    def __init__(self, seed: int, prompt: tuple[int, int], answer: tuple[int, int]) -> None:
        self._random = np.random.default_rng(seed)
        self._prompt, self._answer = prompt, answer
        self._count = 0

    def request(self) -> Request:
        self._count += 1
        length = int(self._random.integers(self._prompt[0], self._prompt[1] + 1))
        return Request(
            key=RequestKey(1, f"request-{self._count}", 1),
            request_number=self._count,
            prompt_token_ids=self._random.integers(3, 32000, length, dtype=np.int32),
            max_tokens=int(self._random.integers(self._answer[0], self._answer[1] + 1)),
            sampling=SamplingParams(),
            arrival=float(self._count),
        )

    def output(self, batch: Batch) -> StepOutput:
        """The output of a step: random tokens, none of which is EOS."""
        token_ids = self._random.integers(3, 32000, (len(batch.rows), 1), dtype=np.int32)
        return StepOutput(token_ids=token_ids, counts=batch.sample.astype(np.int32))


def measure(scheduler: Scheduler, load: Load, num_steps: int, after_step: Callable[[int], None]) -> dict[str, float]:
    """Medians over `num_steps` steps. `after_step(number of sequences that ended)` is not timed. Raises RuntimeError
    when there is nothing to schedule.
    """
    schedule_ns, commit_ns, preempted, tokens = [], [], 0, []
    for _ in range(num_steps):
        start = time.thread_time_ns()
        batch = scheduler.schedule()
        schedule_ns.append(time.thread_time_ns() - start)
        preempted += len(scheduler.take_events().preempted)
        if batch is None:
            raise RuntimeError("nothing to schedule")
        tokens.append(batch.num_tokens)
        output = load.output(batch)
        start = time.thread_time_ns()
        committed = scheduler.commit(output)
        commit_ns.append(time.thread_time_ns() - start)
        scheduler.blocks.take_hash_changes()
        after_step(len(committed.finished))
    both = [first + second for first, second in zip(schedule_ns, commit_ns, strict=True)]
    return {
        "schedule_us": round(median(schedule_ns) / 1000, 1),
        "commit_us": round(median(commit_ns) / 1000, 1),
        "total_us": round(median(both) / 1000, 1),
        "mean_total_us": round(sum(both) / len(both) / 1000, 1),
        "p99_total_us": round(sorted(both)[int(len(both) * 0.99)] / 1000, 1),
        "tokens_per_step": round(sum(tokens) / len(tokens), 1),
        "preemptions": preempted,
    }


def decode(running: int, num_steps: int) -> dict[str, float]:
    """Measures the load decode. The sequences stand at random places in their blocks, and none ends."""
    load = Load(running, (64, 256), (3000, 3000))
    num_blocks = running * (256 + num_steps + 2 * BLOCK_SIZE) // BLOCK_SIZE + 1
    config = EngineConfig(
        max_num_batched_tokens=max(8192, 2 * running),
        max_num_seqs=running,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
    )
    scheduler = Scheduler(config, num_blocks=num_blocks, eos_token_ids=(EOS,))
    for _ in range(running):
        scheduler.add(load.request())
    while not _step_decodes_all(scheduler, load):
        pass
    return {"running": running, **measure(scheduler, load, num_steps, lambda ended: None)}


def _step_decodes_all(scheduler: Scheduler, load: Load) -> bool:
    batch = scheduler.schedule()
    if batch is None:
        raise RuntimeError("nothing to schedule")
    scheduler.commit(load.output(batch))
    return scheduler.num_waiting == 0 and int(batch.num_scheduled.max()) == 1


def mixed(num_blocks: int, num_steps: int) -> dict[str, float]:
    """Measures 256 seats with a budget of 2,048 tokens, where a new request arrives for each one that ends."""
    load = Load(7, (64, 1024), (64, 192))
    config = EngineConfig(
        max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE
    )
    scheduler = Scheduler(config, num_blocks=num_blocks, eos_token_ids=(EOS,))

    def refill(ended: int) -> None:
        for _ in range(ended):
            scheduler.add(load.request())

    refill(272)
    measure(scheduler, load, 400, refill)
    return {"running": scheduler.num_running, **measure(scheduler, load, num_steps, refill)}


def run(num_steps: int = 400, sizes: tuple[int, ...] = (64, 256, 1024, 4096)) -> dict[str, Any]:
    """Measures all loads. `decode` has one entry per number of running sequences."""
    return {
        "decode": [decode(running, num_steps) for running in sizes],
        "mixed": mixed(20_000, num_steps),
        "preemption": mixed(4_000, num_steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--steps", type=int, default=400, help="steps per figure")
    arguments = parser.parse_args()
    figures = run(arguments.steps)
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for figure in [
        *figures["decode"],
        {"load": "mixed", **figures["mixed"]},
        {"load": "preemption", **figures["preemption"]},
    ]:
        print("  ".join(f"{name} {value}" for name, value in figure.items()))


if __name__ == "__main__":
    main()
