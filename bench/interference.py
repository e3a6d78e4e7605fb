"""Measures how long prompts slow running decodes: the inter-token latency of 4 answers, first alone (quiet), then while
prompts of 2,000 tokens keep arriving.

    python -m bench.interference [--json] [--model DIR]

It compares one prefill and one decode engine (one thread each) with a colocated engine (two threads) at three token
budgets, under the same load and in one run of 3 to 6 minutes. The comparison that counts is with the *best* of the
three.

The load fits the machine: prompts arrive every 3 s, or less often where one alone takes a thread longer than 2.4 s.
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
UTILISATION = 0.8
"""Of the time between two long prompts, what one of them alone may take a prefill engine at most."""
NUM_LONG_PROMPTS = 5
MAX_DURATION_S = 45.0
QUIET_S = 6.0
BUDGETS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Load:
    """How often long prompts arrive, and for how long."""

    arrival_s: float
    duration_s: float

    @classmethod
    def fitting(cls, lone_s: float) -> "Load":
        """For a machine on which a prefill engine takes `lone_s` for one long prompt. Prompts that arrived faster than
        they are computed would pile up: then all systems show is how long the run was.
        """
        arrival_s = max(ARRIVAL_S, lone_s / UTILISATION)
        return cls(arrival_s, min(MAX_DURATION_S, (NUM_LONG_PROMPTS + 1) * arrival_s))


@dataclass(frozen=True, slots=True)
class Row:
    """One system under the load. `itl_*` are inter-token latencies of the running decodes in milliseconds, `quiet_*`
    the same without any long prompt; `long_ttft_p50_s` is the median time to first token of the arriving prompts.
    """

    system: str
    quiet_p50_ms: float
    quiet_p99_ms: float
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


async def _gaps(client: AsyncClient, until: float) -> list[float]:
    """Times between tokens of `NUM_DECODES` running answers, in seconds."""
    answers = await asyncio.gather(*(_decode(client, seed, until) for seed in range(NUM_DECODES)))
    return [gap for gaps in answers for gap in gaps]


async def _quiet(port: int) -> list[float]:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await _gaps(client, time.perf_counter() + 1.0)  # warms up
        return await _gaps(client, time.perf_counter() + QUIET_S)


async def _lone_long_s(port: int) -> float:
    """Seconds to the first token of a long prompt that has the system to itself. A first one warms up."""
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        return [await _long(client, seed) for seed in (98, 99)][-1]


async def _loaded(port: int, load: Load) -> tuple[list[float], list[float]]:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        until = time.perf_counter() + load.duration_s
        decodes = asyncio.create_task(_gaps(client, until))
        longs: list[asyncio.Task[float]] = []
        while time.perf_counter() + load.arrival_s < until:
            await asyncio.sleep(load.arrival_s)
            longs.append(asyncio.create_task(_long(client, 100 + len(longs))))
        return await decodes, list(await asyncio.gather(*longs))


def row(
    name: str, model_dir: Path, prefill: int, threads: int, budget: int, load: Load | None, note: Callable[[str], None]
) -> tuple[Row, Load]:
    """Starts one deployment, applies the load and measures. Without a load it finds the one that fits the machine."""
    note(f"{name}: starting")
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
        load = load or Load.fitting(asyncio.run(_lone_long_s(deployment.ports.grpc_port)))
        note(
            f"{name}: {QUIET_S:g} s quiet, then {load.duration_s:.0f} s with a long prompt every {load.arrival_s:.1f} s"
        )
        quiet = np.array(asyncio.run(_quiet(deployment.ports.grpc_port))) * 1e3
        gaps, firsts = asyncio.run(_loaded(deployment.ports.grpc_port, load))
    loud = np.array(gaps) * 1e3
    quiet_p50, quiet_p99, p50, p99 = (float(np.percentile(times, q)) for times in (quiet, loud) for q in (50, 99))
    decode_speed, long_ttft = len(gaps) / load.duration_s, float(np.median(firsts))
    return Row(name, quiet_p50, quiet_p99, p50, p99, float(loud.max()), decode_speed, long_ttft, len(firsts)), load


def run(model_dir: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures all rows, and the ratio of the best colocated p99 to that of the split deployment."""
    split, load = row("1P1D, 1 + 1 threads", model_dir, 1, 1, 512, None, note)
    colocated = [row(f"colocated, budget {budget}", model_dir, 0, 2, budget, load, note)[0] for budget in BUDGETS]
    best = min(colocated, key=lambda r: r.itl_p99_ms)
    return {
        "load": {
            "decodes": NUM_DECODES,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "arrival_s": load.arrival_s,
            "duration_s": load.duration_s,
            "quiet_s": QUIET_S,
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
    load = result["load"]
    print(
        f"{load['decodes']} answers running, a prompt of {load['long_prompt_tokens']} tokens every "
        f"{load['arrival_s']:.1f} s for {load['duration_s']:.0f} s; quiet: no such prompts"
    )
    heads = ("quiet p50", "p99 ms", "ITL p50", "p99 ms", "max ms", "tok/s", "long TTFT s")
    print(f"{'system':24} " + " ".join(f"{head:>11}" for head in heads))
    for r in result["rows"]:
        names = ("quiet_p50_ms", "quiet_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "decode_tokens_per_s")
        figures = [f"{r[name]:11.1f}" for name in names]
        print(f"{r['system']:24} " + " ".join([*figures, f"{r['long_ttft_p50_s']:11.2f}"]))
    print(
        f"p99 of the best colocated ({result['best_colocated']}) over the split's: "
        f"{result['itl_p99_ratio_best_colocated_over_split']:.2f}"
    )


if __name__ == "__main__":
    main()
