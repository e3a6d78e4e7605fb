"""Measures throughput and latency of serving a real model on this machine: split, colocated, and with transformers'
`generate`, under the same load.

    python -m bench.serving [--json] [--model DIR]

Every row is measured in this run, which takes 2 to 6 minutes: sizes that take transformers longer than a minute are
left out. Output tok/s counts the whole load. Percentiles of TTFT and of inter-token latency are those that a client
sees. Handoff time lies between prefill's last commit and decode's first step, messages included; `bytes` is the share
of it that pulls took.
"""

import argparse
import asyncio
import json
import math
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.process import cpu_s
from cluster.config import from_tree
from cluster.fetch import demo_model_dir
from cluster.serve import Deployment
from twopass.client import AsyncClient, Timing

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
BATCHES = (1, 8, 32)
LIMIT_S = 60.0
"""Sizes that take transformers longer are left out for all."""
IDLE_S = 5.0
PEER, FLOOR_NAME = "transformers generate", "linears alone (floor)"
HANDOFF_STAGES = ("reserve_wait", "transfer", "decode_queue", "messages")

TRANSFORMERS = """
import sys, time, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
torch.manual_seed(0)
for line in sys.stdin:
    batch, prompt, output = map(int, line.split())
    ids = torch.randint(100, 40000, (batch, prompt))
    with torch.inference_mode():
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output,
            do_sample=False, pad_token_id=2)
        print(time.perf_counter() - started, flush=True)
"""

FLOOR = """
import bench.engine_threads, json, pathlib, sys, torch
from bench.machine import Speeds, layer_weights, take_turns
from engine.models.registry import read_config
torch.set_num_threads(2)
config, speeds = read_config(pathlib.Path(sys.argv[1])), Speeds()
take_turns(speeds.parts, 3.0)
machine, prompt, output = speeds.machine(), int(sys.argv[2]), int(sys.argv[3])
layers, head = layer_weights(config), config.vocab_size * config.hidden_size
for batch in map(int, sys.argv[4:]):
    prompts = machine.multiplied_s(layers, batch * prompt) + machine.floor_s(head, batch)
    steps = (output - 1) * (machine.floor_s(layers, batch) + machine.floor_s(head, batch))
    print(batch * output / (prompts + steps))
print(machine.read_gb_s, machine.float32_gflop_s)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One system under one load. Times are in milliseconds."""

    system: str
    num_requests: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    handoff_p50_ms: float | None = None
    bytes_share: float | None = None
    scheduler_share: float | None = None
    """Seconds in the scheduler divided by seconds of steps, over all engines of the deployment."""


class Transformers:
    """transformers' `generate` in a process of its own: static batches, greedy, 2 threads."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        command = [sys.executable, "-c", TRANSFORMERS, str(model_dir), dtype]
        self.dtype = dtype
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, batch: int, num_tokens: int) -> float:
        """Of answers of `num_tokens` each to `batch` prompts; infinity once that has taken longer than LIMIT_S, or the
        process has died.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if process.poll() is not None:
            return math.inf
        process.stdin.write(f"{batch} {PROMPT_TOKENS} {num_tokens}\n")
        process.stdin.flush()
        ended = select.select([process.stdout], [], [], LIMIT_S)[0]
        line = process.stdout.readline() if ended else ""
        if not line:
            self.close()
            return math.inf
        return float(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def transformers_rows(model_dir: Path, note: Callable[[str], None]) -> list[Row]:
    """A row for each size, in the dtype that was faster at answers of 4 tokens. Ends with the first size that takes
    longer than LIMIT_S.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        peers = [Transformers(model_dir, dtype) for dtype in ("bfloat16", "float32")]
        for peer in peers:
            stack.callback(peer.close)
            peer.seconds(1, 4)  # loads the model and warms up
        for batch in BATCHES:
            probes = {peer: peer.seconds(batch, 4) for peer in peers}
            best = min(probes, key=probes.__getitem__)
            told = ", ".join(f"{peer.dtype} {probe:.1f} s" for peer, probe in probes.items())
            note(f"transformers, {batch} requests: {told} for 4 tokens")
            seconds = best.seconds(batch, OUTPUT_TOKENS) if math.isfinite(probes[best]) else math.inf
            if not math.isfinite(seconds):
                note(f"transformers, {batch} requests: more than {LIMIT_S:g} s; this size and larger ones are left out")
                break
            rows.append(Row(f"{PEER}, {best.dtype}", batch, batch * OUTPUT_TOKENS / seconds))
    return rows


def floor_rows(model_dir: Path, sizes: Sequence[int], note: Callable[[str], None]) -> list[Row]:
    """A row for each size of what the model's linears alone allow: those of prompts at the speed of float32 matmul,
    those of decode steps at that speed or at the bandwidth with which bf16 weights are read, whichever is slower.
    """
    numbers = [str(number) for number in (PROMPT_TOKENS, OUTPUT_TOKENS, *sizes)]
    command = [sys.executable, "-c", FLOOR, str(model_dir), *numbers]
    *speeds, machine = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    read, multiplied = map(float, machine.split())
    note(f"floor: this machine reads {read:.1f} GB/s and multiplies {multiplied:.0f} GFLOP/s, 2 threads")
    return [Row(FLOOR_NAME, size, float(speed)) for size, speed in zip(sizes, speeds, strict=True)]


async def _one(client: AsyncClient, prompt: list[int], num_tokens: int) -> tuple[list[float], Timing]:
    """Arrival times of one answer's tokens in seconds since the request was sent, and the timing the server reports."""
    started = time.perf_counter()
    times: list[float] = []
    timing: Timing | None = None
    async for chunk in client.generate(prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True):
        times += [time.perf_counter() - started] * len(chunk.token_ids)
        timing = chunk.timing or timing
    assert timing is not None
    return times, timing


async def _load(port: int, batch: int, seed: int) -> tuple[float, list[tuple[list[float], Timing]]]:
    draw = np.random.default_rng(seed)
    prompts = draw.integers(100, 40000, (batch, PROMPT_TOKENS)).tolist()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        started = time.perf_counter()
        answers = await asyncio.gather(*(_one(client, prompt, OUTPUT_TOKENS) for prompt in prompts))
        return time.perf_counter() - started, list(answers)


def _counted(deployment: Deployment) -> dict[str, float]:
    """Counters summed over all engines; `requests` is summed over decode engines only."""
    time.sleep(1.1)  # every engine reports once more in this time
    total: dict[str, float] = {}
    for load in deployment.loads():
        if load.status is not None:
            for name, value in load.status.counters.items():
                if name != "requests" or load.hello.role == "decode":
                    total[name] = total.get(name, 0.0) + value
    return total


def serving_rows(
    name: str,
    model_dir: Path,
    prefill: int,
    decode: int,
    threads: int,
    sizes: Sequence[int],
    note: Callable[[str], None],
) -> tuple[list[Row], float]:
    """Rows of one deployment, and the share of a core that each of its engines takes when idle."""
    pool = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "kv_cache_bytes": 192 * 2**20,
        "num_threads": threads,
    }
    config = from_tree(
        {
            "model": str(model_dir),
            "dtype": "bfloat16",
            "prefill": {**pool, "replicas": prefill},
            "decode": {**pool, "replicas": decode},
            "router": {"grpc_port": 0, "metrics_port": 0},
        }
    )
    rows = []
    with Deployment(config, note) as deployment:
        asyncio.run(_load(deployment.ports.grpc_port, 8, seed=1))  # warms up memory and caches
        for batch in sizes:
            note(f"{name}, {batch} requests")
            before = _counted(deployment)
            seconds, answers = asyncio.run(_load(deployment.ports.grpc_port, batch, seed=2 + batch))
            spent = {key: value - before.get(key, 0.0) for key, value in _counted(deployment).items()}
            rows.append(_row(name, seconds, answers, spent, prefill > 0))
        pids = [deployment.actor(load.address.replica_id).call("pid") for load in deployment.loads()]
        idle_before = sum(map(cpu_s, pids))
        time.sleep(IDLE_S)
        idle = (sum(map(cpu_s, pids)) - idle_before) / IDLE_S / len(pids)
    return rows, idle


def _row(
    name: str, seconds: float, answers: list[tuple[list[float], Timing]], spent: dict[str, float], split: bool
) -> Row:
    gaps = np.concatenate([np.diff(times) for times, _ in answers]) * 1e3
    first = np.array([times[0] for times, _ in answers]) * 1e3
    handoffs = [sum(timing.stages.get(stage, 0.0) for stage in HANDOFF_STAGES) for _, timing in answers]
    handoff_s = float(np.median(handoffs))
    pulled_s = spent.get("pull_seconds", 0.0) / max(1.0, spent["requests"])
    return Row(
        system=name,
        num_requests=len(answers),
        output_tokens_per_s=sum(len(times) for times, _ in answers) / seconds,
        ttft_p50_ms=float(np.percentile(first, 50)),
        ttft_p99_ms=float(np.percentile(first, 99)),
        itl_p50_ms=float(np.percentile(gaps, 50)),
        itl_p99_ms=float(np.percentile(gaps, 99)),
        handoff_p50_ms=handoff_s * 1e3 if split else None,
        bytes_share=min(1.0, pulled_s / handoff_s) if split and handoff_s else None,
        scheduler_share=spent["scheduler_seconds"] / spent["step_seconds"],
    )


def run(model_dir: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures all rows, and their ratios to transformers and to the floor at the same number of requests."""
    rows = transformers_rows(model_dir, note)
    peers = {row.num_requests: row.output_tokens_per_s for row in rows}
    rows += floor_rows(model_dir, tuple(peers), note)
    colocated, idle_colocated = serving_rows("colocated, 2 threads", model_dir, 0, 1, 2, tuple(peers), note)
    split, idle_split = serving_rows("1P1D, 1 + 1 threads", model_dir, 1, 1, 1, tuple(peers), note)
    rows += colocated + split
    floors = {row.num_requests: row.output_tokens_per_s for row in rows if row.system == FLOOR_NAME}
    return {
        "load": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "dtype": "bfloat16"},
        "rows": [
            {
                **asdict(row),
                "ratio": row.output_tokens_per_s / peers[row.num_requests],
                "floor_ratio": row.output_tokens_per_s / floors[row.num_requests],
            }
            for row in rows
        ],
        "idlecpu_share_of_a_core": {"colocated": idle_colocated, "1P1D": idle_split},
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: one line per row, with a dash where a figure does not apply."""
    heads = (
        "system",
        "reqs",
        "tok/s",
        "ratio",
        "floor",
        "TTFT p50/p99 ms",
        "ITL p50/p99 ms",
        "handoff ms",
        "bytes",
        "sched",
    )
    widths = (33, 5, 7, 6, 6, 17, 16, 11, 6, 6)

    def pair(row: dict[str, Any], name: str) -> str:
        return "-" if row[f"{name}_p50_ms"] is None else f"{row[f'{name}_p50_ms']:.1f} / {row[f'{name}_p99_ms']:.1f}"

    def one(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [heads]
    for row in result["rows"]:
        cells.append(
            (
                *(row["system"], str(row["num_requests"]), f"{row['output_tokens_per_s']:.0f}", f"{row['ratio']:.2f}"),
                f"{row['floor_ratio']:.0%}",
                *(pair(row, "ttft"), pair(row, "itl"), one(row["handoff_p50_ms"], ".1f")),
                *(one(row["bytes_share"], ".0%"), one(row["scheduler_share"], ".1%")),
            )
        )
    lines = [
        " ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    idle = ", ".join(f"{name} {share:.2%}" for name, share in result["idlecpu_share_of_a_core"].items())
    return "\n".join([*lines, f"CPU of an idle engine, share of a core: {idle}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput and latency of a served model, in one run.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(arguments.model or demo_model_dir(note), note)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()
