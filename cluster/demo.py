"""`make demo`: a whole deployment on one machine answers eight prompts at once, and shows where their time went.

1. fetch the model (once), start a private Ray, the router, one prefill and one decode engine
2. send all prompts through the gRPC client; answers grow on the screen
3. two tables: per request the time to first token and its parts, per engine its last steps, blocks and transfers
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.config import ClusterConfig, from_tree
from cluster.fetch import demo_model_dir
from cluster.serve import Deployment, Progress
from protocol.messages import Address
from router.policy import ReplicaView
from twopass.client import AsyncClient, Timing
from twopass.console import plain_console

STAGES = {
    "queue": ("tokenize", "router_queue", "prefill_queue"),
    "prefill": ("prefill",),
    "transfer": ("transfer",),
    "decode\nqueue": ("reserve_wait", "decode_queue"),
    "first\nstep": ("first_step",),
}
"""Columns of the first table, and the stages that each sums up. Queue and prefill lie before the first token, the
others after it.
"""

NUM_STEPS = 4
REFRESH_S = 0.1
SAMPLE_S = 0.5
"""Between two looks at the engines while they work."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`chat`: a user's message for the chat template; else text to continue."""

    name: str
    text: str
    max_tokens: int
    chat: bool = True


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; times in seconds from when it was sent."""

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
        """Percentile of the times between two tokens; tokens that came together count 0 apart."""
        gaps = np.diff(self.token_times_s)
        return float(np.percentile(gaps, percent)) if len(gaps) else 0.0

    def stage_s(self, column: str) -> float:
        stages = self.timing.stages if self.timing else {}
        return sum(stages.get(name, 0.0) for name in STAGES[column])


def prompts() -> list[Prompt]:
    """Chat, story, code, one long prompt, several languages."""
    return [
        Prompt("chat", "What is a good way to learn to cook?", 64),
        Prompt("story", "The lighthouse keeper had not seen a ship for forty days. That morning,", 96, chat=False),
        Prompt("code", 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n', 64, chat=False),
        Prompt("long", _logbook() + "\nWhich goods did the ship carry? Answer in one sentence.", 48),
        Prompt("languages", "Say good morning in English, français, español, Deutsch, 日本語 and русский.", 64),
        Prompt("list", "Name five animals that live in the sea.", 48),
        Prompt("letter", "Write a short letter to a friend about the first snow of the year.", 96),
        Prompt("facts", "The capital of France is", 16, chat=False),
    ]


def _logbook() -> str:
    """A ship's log of about 700 tokens."""
    goods = ("salt", "barrels of tar", "wool", "dried fish", "copper", "candles", "tea")
    winds = ("north", "north-east", "east", "south-west", "west")
    ports = ("Bergen", "Leith", "Ostend", "Cork", "Lisbon", "Cadiz")
    return "Log of the brig Marianne.\n" + "\n".join(
        f"Day {day}: wind from the {winds[day % 5]}, {3 + day * 7 % 11} knots. We took on {goods[day % 7]} bound for "
        f"{ports[day % 6]}."
        for day in range(1, 25)
    )


def run(model: Path | None, out: Path | None) -> None:
    """Raises TwopassError. Leaves nothing running."""
    console = plain_console()
    with ExitStack() as running:
        with _waiting(console) as progress:
            model_dir = model or demo_model_dir(progress)
            deployment = running.enter_context(Deployment(_config(model_dir), progress))
        answers = [Answer(prompt) for prompt in prompts()]
        busiest = asyncio.run(_answer_all(deployment, answers, console))
        console.print(_request_table(answers))
        with _waiting(console) as progress:
            progress("collecting the engines' figures")
            engines = [
                _engine_facts(replica, busiest.get(replica.address, replica)) for replica in _final_loads(deployment)
            ]
            progress("stopping")
            running.close()
    console.print(_engine_table(engines))
    if out is not None:
        facts = {
            "model": str(model_dir),
            "requests": [_request_facts(answer) for answer in answers],
            "engines": engines,
        }
        out.write_text(json.dumps(facts, indent=2, ensure_ascii=False))


def _config(model_dir: Path) -> ClusterConfig:
    pool = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 8, "kv_cache_bytes": 256 * 1024**2}
    prefill = {**pool, "long_prefill_token_threshold": 128}  # the long prompt leaves half of each step to the others
    return from_tree(
        {"model": str(model_dir), "prefill": prefill, "decode": pool, "router": {"grpc_port": 0, "metrics_port": 0}}
    )


@contextmanager
def _waiting(console: Console) -> Iterator[Progress]:
    """Yields a function that says what is being waited for; on a terminal a spinner turns beside it."""
    started_at = time.monotonic()
    with console.status("") if console.is_terminal else nullcontext() as status:

        def progress(text: str) -> None:
            console.print(f"{time.monotonic() - started_at:5.1f} s  {text}", style="dim", soft_wrap=True)
            if status is not None:
                status.update(Text(text))  # of a str it would read the markup

        yield progress


async def _answer_all(deployment: Deployment, answers: list[Answer], console: Console) -> dict[Address, ReplicaView]:
    """Sends all prompts at once and shows the answers as they grow. Returns each engine as it was seen with the fewest
    free blocks.
    """
    busiest: dict[Address, ReplicaView] = {}
    stopping = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(_watch, deployment, busiest, stopping))
    try:
        async with AsyncClient(f"127.0.0.1:{deployment.port}") as client:
            tasks = [asyncio.create_task(_answer(client, answer)) for answer in answers]
            if console.is_terminal:
                with Live(console=console, auto_refresh=False) as live:
                    while not all(task.done() for task in tasks) and not watching.done():
                        live.update(_answer_table(answers, console.width), refresh=True)
                        await asyncio.wait(tasks, timeout=REFRESH_S)
                    live.update(_answer_table(answers, console.width), refresh=True)
            for answer, task in zip(answers, tasks, strict=True):
                await asyncio.wait([task, watching], return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                await task
                if not console.is_terminal:
                    console.print(f"{answer.prompt.name}: {answer.text!r}", soft_wrap=True)
    finally:
        stopping.set()
    await watching
    return busiest


def _watch(deployment: Deployment, busiest: dict[Address, ReplicaView], stopping: threading.Event) -> None:
    """Keeps the deployment alive and notes every engine's fullest status in `busiest`. Raises StartupError when the
    router is gone.
    """
    while not stopping.is_set():
        for replica in deployment.loads():
            before = busiest.get(replica.address)
            if replica.status is not None and (
                before is None
                or before.status is None
                or replica.status.num_free_blocks < before.status.num_free_blocks
            ):
                busiest[replica.address] = replica
        deployment.watch(SAMPLE_S)


async def _answer(client: AsyncClient, answer: Answer) -> None:
    prompt, sent_at = answer.prompt, time.monotonic()
    if prompt.chat:
        stream = client.chat(
            [{"role": "user", "content": prompt.text}], max_tokens=prompt.max_tokens, request_id=prompt.name
        )
    else:
        stream = client.generate(prompt.text, max_tokens=prompt.max_tokens, request_id=prompt.name)
    async for chunk in stream:
        answer.text += chunk.text
        answer.token_times_s += [time.monotonic() - sent_at] * len(chunk.token_ids)
        answer.num_prompt_tokens = chunk.prompt_tokens or answer.num_prompt_tokens
        answer.finish_reason = chunk.finish_reason or ""
        answer.timing = chunk.timing or answer.timing


def _final_loads(deployment: Deployment) -> list[ReplicaView]:
    """Every engine with a status sent after the last answer, so that its counters are final. Prefill first."""
    seen = {replica.address: replica.status.seq if replica.status else 0 for replica in deployment.loads()}
    while True:
        loads = deployment.loads()
        if all(
            replica.status is not None and replica.status.seq > seen.get(replica.address, 0) + 1 for replica in loads
        ):
            return sorted(loads, key=lambda replica: replica.hello.role, reverse=True)
        deployment.watch(0.1)


def _answer_table(answers: list[Answer], width: int) -> Table:
    table = Table(box=None, show_header=False, width=width)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="crop")
    for answer in answers:
        tail = " ".join(answer.text.split())[-(width - 24) :]
        table.add_row(answer.prompt.name, str(len(answer.token_times_s)), tail)
    return table


def _request_table(answers: list[Answer]) -> Table:
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
        "TTFT = queue + prefill + messages; transfer, decode queue and first step lie between the first and the second "
        "token"
    )
    return table


def _engine_table(engines: list[dict[str, Any]]) -> Table:
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


def _engine_facts(replica: ReplicaView, busiest: ReplicaView) -> dict[str, Any]:
    """`busiest`: the same engine under load, for its last steps and blocks; counters are of the end."""
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


def _request_facts(answer: Answer) -> dict[str, Any]:
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
