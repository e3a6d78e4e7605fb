"""Measures how long prompts slow running decodes: the inter-token latency of 4 answers while prompts of 2,000 tokens
keep arriving.

    python -m bench.interference [--json] [--model DIR]

It compares one prefill and one decode engine (one thread each) with a colocated engine (two threads) at three token
budgets, under the same load and in one run. The comparison that counts is with the *best* of the three.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import from_tree
from cluster.fetch import demo_model_dir
from cluster.serve import Deployment
from twopass.client import AsyncClient

NUM_DECODES = 4
LONG_PROMPT_TOKENS = 2000
ARRIVAL_S = 3.0
DURATION_S = 18.0
BUDGETS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Row:
    """One system under the load. `itl_*` are inter-token latencies of the running decodes in milliseconds;
    `long_ttft_p50_s` is the median time to first token of the arriving prompts.
    """

    system: str
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    """The longest stall. When prompts are few, one that is computed in a single step shows only above p99."""
    decode_tokens_per_s: float
    long_ttft_p50_s: float
    num_long_prompts: int


async def _decode(client: AsyncClient, seed: int, until: float) -> list[float]:
    """Asks for one answer after the other until `until`; returns the times between their tokens, in seconds."""
    draw = np.random.default_rng(seed)
    gaps: list[float] = []
    while time.perf_counter() < until:
        last: float | None = None
        async with client.generate(
            prompt_token_ids=draw.integers(100, 40000, 16).tolist(), max_tokens=400, ignore_eos=True
        ) as stream:
            async for chunk in stream:
                now = time.perf_counter()
                if last is not None:
                    gaps += [now - last] + [0.0] * (len(chunk.token_ids) - 1)
                last = now
                if now >= until:
                    break
    return gaps


async def _long(client: AsyncClient, seed: int) -> float:
    """Asks for an answer to one long prompt and returns the seconds to its first token."""
    prompt = np.random.default_rng(seed).integers(100, 40000, LONG_PROMPT_TOKENS).tolist()
    started = time.perf_counter()
    answer = await client.generate_text(prompt_token_ids=prompt, max_tokens=4, ignore_eos=True)
    return answer.timing.ttft_s or time.perf_counter() - started


async def _load(port: int) -> tuple[list[float], list[float]]:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        until = time.perf_counter() + DURATION_S
        decodes = [asyncio.create_task(_decode(client, seed, until)) for seed in range(NUM_DECODES)]
        longs: list[asyncio.Task[float]] = []
        while time.perf_counter() + ARRIVAL_S < until:
            await asyncio.sleep(ARRIVAL_S)
            longs.append(asyncio.create_task(_long(client, 100 + len(longs))))
        gaps = [gap for gaps in await asyncio.gather(*decodes) for gap in gaps]
        return gaps, list(await asyncio.gather(*longs))


def row(name: str, model_dir: Path, prefill: int, threads: int, budget: int, note: Callable[[str], None]) -> Row:
    """Starts one deployment, applies the load and measures."""
    note(name)
    pool = {
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "kv_cache_bytes": 400 * 2**20,
        "num_threads": threads,
        "max_num_batched_tokens": budget,
    }
    config = from_tree(
        {
            "model": str(model_dir),
            "prefill": {**pool, "replicas": prefill},
            "decode": pool,
            "router": {"grpc_port": 0, "metrics_port": 0},
        }
    )
    with Deployment(config, lambda text: None) as deployment:
        gaps, firsts = asyncio.run(_load(deployment.port))
    milliseconds = np.array(gaps) * 1e3
    p50, p99 = (float(np.percentile(milliseconds, q)) for q in (50, 99))
    return Row(name, p50, p99, float(milliseconds.max()), len(gaps) / DURATION_S, float(np.median(firsts)), len(firsts))


def run(model_dir: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures all rows, and the ratio of the best colocated p99 to that of the split deployment."""
    split = row("1P1D, 1 + 1 threads", model_dir, 1, 1, 512, note)
    colocated = [row(f"colocated, budget {budget}", model_dir, 0, 2, budget, note) for budget in BUDGETS]
    best = min(colocated, key=lambda r: r.itl_p99_ms)
    return {
        "load": {
            "decodes": NUM_DECODES,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "arrival_s": ARRIVAL_S,
            "duration_s": DURATION_S,
        },
        "rows": [asdict(r) for r in (split, *colocated)],
        "best_colocated": best.system,
        "itl_p99_ratio_best_colocated_over_split": best.itl_p99_ms / split.itl_p99_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Inter-token latency of running decodes while long prompts arrive.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(arguments.model or demo_model_dir(note), note)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{'system':24} {'ITL p50':>8} {'p99 ms':>8} {'max ms':>8} {'tok/s':>7} {'long TTFT s':>12}")
    for r in result["rows"]:
        latency = f"{r['itl_p50_ms']:8.1f} {r['itl_p99_ms']:8.1f} {r['itl_max_ms']:8.1f}"
        print(f"{r['system']:24} {latency} {r['decode_tokens_per_s']:7.0f} {r['long_ttft_p50_s']:12.2f}")
    print(
        f"p99 of the best colocated ({result['best_colocated']}) over the split's: "
        f"{result['itl_p99_ratio_best_colocated_over_split']:.2f}"
    )


if __name__ == "__main__":
    main()
