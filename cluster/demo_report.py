"""What the demo shows of its answers and engines: as tables for people, as JSON for programs."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from cluster.demo_prompts import Prompt
from router.policy import ReplicaView
from twopass.client import Timing

STAGES = {
    "queue": ("tokenize", "router_queue", "prefill_queue"),
    "prefill": ("prefill",),
    "transfer": ("transfer",),
    "decode\nqueue": ("reserve_wait", "decode_queue"),
    "first\nstep": ("first_step",),
}
"""Columns of the first table, and the stages that each of them sums up. Queue and prefill come before the first token,
the others after it.
"""

NUM_STEPS = 4
"""The second table shows this many of an engine's last steps."""


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are in seconds since it was sent."""

    prompt: Prompt
    text: str = ""
    num_prompt_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str = ""
    timing: Timing | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] if self.token_times_s else 0.0

    def inter_token_s(self, percent: float) -> float:
        """Percentile of the times between two tokens. Tokens that came together are 0 s apart."""
        gaps = np.diff(self.token_times_s)
        return float(np.percentile(gaps, percent)) if len(gaps) else 0.0

    def stage_s(self, column: str) -> float:
        stages = self.timing.stages if self.timing else {}
        return sum(stages.get(name, 0.0) for name in STAGES[column])


def answer_table(answers: list[Answer], width: int) -> Table:
    table = Table(box=None, show_header=False, width=width)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="crop")
    for answer in answers:
        tail = " ".join(answer.text.split())[-(width - 24) :]
        table.add_row(answer.prompt.name, str(len(answer.token_times_s)), tail)
    return table


def request_table(answers: list[Answer]) -> Table:
    table = Table(title="Requests (times in ms)", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("request", style="bold cyan", overflow="fold")
    for name in ("tokens", "TTFT", *STAGES, "token\np50", "token\np99"):
        table.add_column(name, justify="right", overflow="fold")
    for answer in answers:
        times = [
            answer.ttft_s,
            *(answer.stage_s(column) for column in STAGES),
            answer.inter_token_s(50),
            answer.inter_token_s(99),
        ]
        milliseconds = [f"{seconds * 1e3:.0f}" for seconds in times]
        table.add_row(answer.prompt.name, f"{answer.num_prompt_tokens}+{len(answer.token_times_s)}", *milliseconds)
    table.caption = (
        "TTFT = queue + prefill + messages; "
        "transfer, decode queue and first step lie between the first and the second token"
    )
    return table


def engine_table(engines: list[dict[str, Any]]) -> Table:
    table = Table(title="Engines", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("engine", style="bold cyan", overflow="fold")
    table.add_column(f"{NUM_STEPS} steps, tokens of each request", overflow="fold")
    for name in ("steps", "blocks\nused", "KV\nmoved", "GB/s"):
        table.add_column(name, justify="right", overflow="fold")
    for engine in engines:
        steps = "\n".join(
            "  ".join(f"{request_id}:{num}" for request_id, num in step.items())
            for step in engine["num_scheduled_tokens"]
        )
        table.add_row(
            engine["replica_id"],
            steps or "-",
            f"{engine['steps']:.0f}",
            f"{engine['num_blocks_used']}/{engine['num_blocks']}",
            f"{engine['bytes_moved'] / 1e6:.1f} MB" if engine["bytes_moved"] else "-",
            f"{engine['gb_per_s']:.2f}" if engine["gb_per_s"] else "-",
        )
    return table


def engine_facts(replica: ReplicaView, busiest: ReplicaView) -> dict[str, Any]:
    """What is shown of one engine. `replica` is the engine at the end and gives the counters; `busiest` is the same
    engine under load and gives steps and blocks.
    """
    num_blocks = replica.hello.num_blocks - 1
    counters = replica.status.counters if replica.status else {}
    num_bytes, seconds = counters.get("pulled_bytes", 0.0), counters.get("pull_seconds", 0.0)
    return {
        "replica_id": replica.address.replica_id,
        "role": replica.hello.role,
        "num_scheduled_tokens": list(busiest.status.num_scheduled_tokens[-NUM_STEPS:]) if busiest.status else [],
        "steps": counters.get("steps", 0.0),
        "num_blocks": num_blocks,
        "num_blocks_used": num_blocks - busiest.status.num_free_blocks if busiest.status else 0,
        "bytes_moved": num_bytes,
        "gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0,
        "counters": counters,
    }


def request_facts(answer: Answer) -> dict[str, Any]:
    return {
        "name": answer.prompt.name,
        "text": answer.text,
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": len(answer.token_times_s),
        "finish_reason": answer.finish_reason,
        "ttft_s": answer.ttft_s,
        "inter_token_p50_s": answer.inter_token_s(50),
        "inter_token_p99_s": answer.inter_token_s(99),
        "timing": asdict(answer.timing) if answer.timing else None,
    }
