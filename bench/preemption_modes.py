"""Compares the preemption modes under KV pressure: `python -m bench.preemption_modes [--json] [--model DIR]`.

Costs are measured on the real model and runner in this process: a decode step, a prompt token, a block copied to host
memory. The load then runs in the simulator with these costs: the real router, services and schedulers of one prefill
and one decode engine, a virtual clock, messages that take 1 ms, and blocks that are pulled at the speed of a copy. The
decode engine holds only a part of the KV that the load needs at its peak. Load and tokens are the same in every mode.
`auto` starts without measurements, as it does in an engine.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.fetch import demo_model_dir
from engine.config import EngineConfig, Knob
from engine.models.loading import load_model
from engine.runner import Batch
from engine.runners.arithmetic_model import expected_tokens
from engine.runners.torch_cpu import TorchCPURunner
from protocol.messages import SamplingParams
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from router.admission import ClientRequest
from router.config import RouterConfig
from simulator.scenario import NO_FAULTS, Client, Scenario
from simulator.simulation import Simulation

BLOCK_SIZE = 16
CONTEXT = 256
"""Tokens that each sequence has in the measured steps."""
NUM_REQUESTS, MAX_NUM_SEQS = 48, 16
PROMPT_TOKENS, ANSWER_TOKENS = (64, 192), (128, 320)
NUM_BLOCKS = 16 * 15
"""KV blocks of the decode engine. They hold 16 sequences of 240 tokens, but the longest grow to 512 tokens. The prefill
engine has twice as many.
"""
WIRE_S = 0.001
"""Time that a message is under way."""
FIRST_ARRIVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs in seconds. A step takes `step_s`, plus `decode_s` per decode and `prompt_token_s` per prompt token."""

    step_s: float
    decode_s: float
    prompt_token_s: float
    copy_block_s: float
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One mode under the load. Rates count the time from the first arrival to the last token."""

    mode: str
    num_host_blocks: int
    output_tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    preemptions: dict[str, int]
    """Number of preemptions by mode."""
    reasons: dict[str, int]
    recomputed_tokens: int
    """Tokens that the decode engine computed again."""
    prefilled_again_tokens: int
    """Tokens that the prefill engine computed again."""
    swapped_mbytes: float


# ---- costs


def measure_costs(model_dir: Path, num_repeats: int = 6) -> MeasuredCosts:
    """Measures with one thread in bfloat16. The kinds of steps take turns, and the fastest repeat of each counts,
    because other programs may use the machine too.
    """
    model = load_model(model_dir, "bfloat16")
    config, blocks_each = model.config, CONTEXT // BLOCK_SIZE + 1
    block_bytes = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim * model.dtype.itemsize
    cache = torch.zeros((MAX_NUM_SEQS * blocks_each + 1) * block_bytes, dtype=torch.uint8)
    runner = TorchCPURunner(model, cache, block_size=BLOCK_SIZE, num_threads=1, num_host_blocks=MAX_NUM_SEQS)
    seconds: dict[str, list[float]] = {"one": [], "many": [], "prompt": [], "copy": []}
    pairs = np.stack([np.arange(1, MAX_NUM_SEQS + 1), np.arange(MAX_NUM_SEQS)], axis=1).astype(np.int32)
    for _ in range(num_repeats):
        seconds["one"].append(runner.execute(_batch(1, CONTEXT, 1)).seconds)
        seconds["many"].append(runner.execute(_batch(MAX_NUM_SEQS, CONTEXT, 1)).seconds)
        seconds["prompt"].append(runner.execute(_batch(1, 0, CONTEXT)).seconds)
        copies = _batch(0, 0, 0)
        copies.swap_out, copies.swap_in = pairs, pairs[:, ::-1]
        seconds["copy"].append(runner.execute(copies).swap_seconds)
    one, many, prompt, copy = (min(values) for values in seconds.values())
    decode_s = max(many - one, 0.0) / (MAX_NUM_SEQS - 1)
    step_s = max(one - decode_s, 0.0)
    return MeasuredCosts(step_s, decode_s, (prompt - step_s) / CONTEXT, copy / (2 * len(pairs)), block_bytes)


def _batch(num_sequences: int, computed: int, scheduled: int) -> Batch:
    blocks_each = CONTEXT // BLOCK_SIZE + 1
    return Batch(
        step=0,
        rows=np.arange(num_sequences, dtype=np.int32),
        num_scheduled=np.full(num_sequences, scheduled, np.int32),
        num_computed=np.full(num_sequences, computed, np.int32),
        sample=np.ones(num_sequences, np.bool_),
        token_ids=np.full((MAX_NUM_SEQS, CONTEXT + 1), 5, np.int32),
        block_tables=np.arange(1, MAX_NUM_SEQS * blocks_each + 1, dtype=np.int32).reshape(MAX_NUM_SEQS, blocks_each),
    )


# ---- the load


def pressure(
    mode: Knob, costs: MeasuredCosts, *, num_host_blocks: int, num_requests: int = NUM_REQUESTS, seed: int = 1
) -> Scenario:
    """One prefill engine, and one decode engine in the given mode that is too small for the load."""

    def step_seconds(batch: Batch) -> float:
        num_decodes = int(np.count_nonzero(batch.num_scheduled == 1))
        if not len(batch.rows):
            return 0.0
        return costs.step_s + num_decodes * costs.decode_s + (batch.num_tokens - num_decodes) * costs.prompt_token_s

    engine = EngineConfig(
        max_num_batched_tokens=256,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=PROMPT_TOKENS[1] + ANSWER_TOKENS[1],
        block_size=BLOCK_SIZE,
        num_blocks=2 * NUM_BLOCKS,
    )
    return Scenario(
        seed=seed,
        num_prefill=1,
        num_decode=1,
        prefill=replace(engine, prompt_reservation="hold"),
        decode=replace(engine, num_blocks=NUM_BLOCKS, preemption=mode, num_host_blocks=num_host_blocks),
        router=RouterConfig(),
        clients=_clients(num_requests, seed),
        faults=NO_FAULTS,
        step_seconds=step_seconds,
        wire_seconds=lambda: WIRE_S,
        block_seconds=lambda: costs.copy_block_s,
        copy_block_s=costs.copy_block_s,
        horizon_s=1e5,
    )


def _clients(count: int, seed: int) -> list[Client]:
    draw, clients = np.random.default_rng(seed), []
    for index in range(count):
        prompt = draw.integers(0, 32000, draw.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1))
        num_tokens = int(draw.integers(ANSWER_TOKENS[0], ANSWER_TOKENS[1] + 1))
        request = ClientRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompt.astype(np.int32),
            max_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        clients.append(
            Client(
                request,
                expected_tokens(prompt.tolist(), num_tokens),
                submit_at=FIRST_ARRIVAL_S + draw.uniform(0.0, 0.1),
            )
        )
    return clients


def run_mode(mode: Knob, costs: MeasuredCosts, *, num_host_blocks: int, num_requests: int = NUM_REQUESTS) -> Row:
    """Runs the load in one mode. Raises RuntimeError if any answer is wrong."""
    simulation = Simulation(
        pressure(mode, costs, num_host_blocks=num_host_blocks, num_requests=num_requests), checked=False
    )
    simulation.run()
    if any(client.received != client.expected for client in simulation.clients.values()):
        raise RuntimeError(f"preemption {mode}: an answer differs")
    gaps = np.concatenate([np.diff(client.received_at) for client in simulation.clients.values()])
    times = np.concatenate([client.received_at for client in simulation.clients.values()])
    decode, prefill = (simulation.replicas[name].service.counters for name in ("decode-0", "prefill-0"))
    decode_scheduler = simulation.replicas["decode-0"].scheduler
    prompts = sum(len(client.request.prompt_token_ids) for client in simulation.clients.values())
    return Row(
        mode=mode,
        num_host_blocks=num_host_blocks,
        output_tokens_per_s=round(len(times) / (times.max() - FIRST_ARRIVAL_S), 1),
        itl_p50_ms=round(float(np.percentile(gaps, 50)) * 1000, 1),
        itl_p99_ms=round(float(np.percentile(gaps, 99)) * 1000, 1),
        preemptions={name: int(decode[counter]) for name, counter in MODE_COUNTERS.items()},
        reasons={name: int(n) for name, counter in REASON_COUNTERS.items() if (n := decode[counter])},
        recomputed_tokens=decode_scheduler.num_recomputed_tokens,
        prefilled_again_tokens=int(prefill["prompt_tokens"]) - prompts,
        swapped_mbytes=round(decode["swapped_bytes"] / (8 * BLOCK_SIZE) * costs.block_bytes / 1e6, 1),
    )


def run(model_dir: Path, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measures all figures, and the ratio of each mode's figures to those of recompute."""
    started = time.perf_counter()
    costs = measure_costs(model_dir)
    note(f"measured in {time.perf_counter() - started:.1f} s: {costs}")
    ample, scarce = NUM_BLOCKS, NUM_BLOCKS // 12
    loads: list[tuple[Knob, int]] = [
        ("recompute", 0),
        ("swap", ample),
        ("swap", scarce),
        ("remote", 0),
        ("auto", ample),
        ("auto", scarce),
    ]
    rows = [run_mode(mode, costs, num_host_blocks=num_host_blocks) for mode, num_host_blocks in loads]
    ratios = [
        {
            "mode": row.mode,
            "num_host_blocks": row.num_host_blocks,
            "output_tokens_per_s": round(row.output_tokens_per_s / rows[0].output_tokens_per_s, 3),
            "itl_p99": round(row.itl_p99_ms / rows[0].itl_p99_ms, 3),
        }
        for row in rows
    ]
    load = {"num_requests": NUM_REQUESTS, "prompt": PROMPT_TOKENS, "answer": ANSWER_TOKENS, "decode_blocks": NUM_BLOCKS}
    how = "simulator, costs measured in this run"
    return {"how": how, "costs": asdict(costs), "load": load, "rows": [*map(asdict, rows)], "over_recompute": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--model", type=Path, help="model directory (default: the demonstration model)")
    arguments = parser.parse_args()
    note: Callable[[str], None] = (lambda text: None) if arguments.json else print
    figures = run(arguments.model or demo_model_dir(note), note)
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for row in figures["rows"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
