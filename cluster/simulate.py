"""Runs a deployment under a workload in virtual time, and tells its throughput and latency.

    twopass simulate --config deploy/local.yaml --workload poisson:requests=200,rate=2,prompt=512,output=128

The router, services and schedulers are the real ones, with the configuration's knobs. Step times come from `StepCosts`
and tokens from the arithmetic model. A workload is `poisson:...` or a file of JSON lines such as

    {"at_s": 0.0, "prompt_tokens": 512, "output_tokens": 128}
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import ClusterConfig
from engine.runner import Batch
from engine.runners.arithmetic_model import expected_tokens
from protocol.errors import ConfigError
from protocol.messages import PoolName, SamplingParams
from router.admission import ClientRequest
from simulator.scenario import NO_FAULTS, Client, Scenario
from simulator.simulation import Simulation

START_S = 0.5
"""Time of the first arrival. All engines have sent their `Hello` by then."""
POISSON_DEFAULTS = {"requests": 100.0, "rate": 2.0, "prompt": 256.0, "output": 64.0, "seed": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs in seconds. The defaults are those of SmolLM2-135M in bfloat16 on one thread of a server CPU, as `python -m
    bench.preemption_modes` measures them.
    """

    step_s: float = 0.008
    """Fixed cost of a step that is not empty."""
    decode_s: float = 0.0011
    """Cost of each sequence that decodes in the step."""
    prompt_token_s: float = 0.00044
    """Cost of each prompt token in the step."""
    block_s: float = 0.0001
    """Time to move one KV block between two engines, or between an engine and host memory."""
    wire_s: float = 0.001
    """Time that a message is under way."""

    def of(self, batch: Batch) -> float:
        num_decodes = int(np.count_nonzero(batch.num_scheduled == 1))
        if not len(batch.rows):
            return 0.0
        return self.step_s + num_decodes * self.decode_s + (batch.num_tokens - num_decodes) * self.prompt_token_s


def workload(text: str) -> list[tuple[float, int, int]]:
    """Requests as (arrival in seconds, prompt tokens, output tokens), ordered by arrival.

    Raises ConfigError naming what is wrong.
    """
    if not text.startswith("poisson:") and text != "poisson":
        return _from_file(Path(text))
    values = dict(POISSON_DEFAULTS)
    for part in filter(None, text.partition(":")[2].split(",")):
        name, _, value = part.partition("=")
        if name not in values:
            raise ConfigError(f"workload: no such key {name!r} in {text!r}; known are {', '.join(values)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"workload: {name}: {value!r} is not a number") from None
        if values[name] <= 0:
            raise ConfigError(f"workload: {name}: {value} is not above 0")
    draw = np.random.default_rng(int(values["seed"]))
    count = int(values["requests"])
    arrivals = np.cumsum(draw.exponential(1 / values["rate"], count))
    lengths = [np.maximum(1, draw.poisson(values[name], count)) for name in ("prompt", "output")]
    return list(zip(arrivals.tolist(), *(length.tolist() for length in lengths), strict=True))


def _from_file(path: Path) -> list[tuple[float, int, int]]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return sorted((float(row["at_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows)
    except OSError as error:
        raise ConfigError(f"workload: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"workload: {path}: not JSON lines of at_s, prompt_tokens, output_tokens: {error!r}"
        ) from None


def scenario(
    config: ClusterConfig, requests: list[tuple[float, int, int]], costs: StepCosts, *, num_blocks: dict[PoolName, int]
) -> Scenario:
    """`num_blocks` are the KV blocks of one engine of the pools "prefill" and "decode"."""
    return Scenario(
        seed=1,
        num_prefill=config.prefill.replicas,
        num_decode=config.decode.replicas,
        prefill=replace(config.prefill.engine, num_blocks=num_blocks["prefill"]),
        decode=replace(config.decode.engine, num_blocks=num_blocks["decode"]),
        router=config.router,
        clients=_clients(requests),
        faults=NO_FAULTS,
        step_seconds=costs.of,
        wire_seconds=lambda: costs.wire_s,
        block_seconds=lambda: costs.block_s,
        copy_block_s=costs.block_s,
        horizon_s=1e6,
    )


def _clients(requests: list[tuple[float, int, int]]) -> list[Client]:
    draw = np.random.default_rng(0)
    clients = []
    for index, (at_s, num_prompt, num_output) in enumerate(requests):
        prompt = draw.integers(0, 32000, num_prompt).astype(np.int32)
        request = ClientRequest(
            request_id=f"r{index}", prompt_token_ids=prompt, max_tokens=num_output, sampling=SamplingParams()
        )
        clients.append(Client(request, expected_tokens(prompt.tolist(), num_output), START_S + at_s))
    return clients


def simulate(plan: Scenario) -> dict[str, Any]:
    """Runs the scenario and returns throughput, time to first token and inter-token latency, in virtual seconds."""
    simulation = Simulation(plan, checked=False)
    simulation.run()
    done = [client for client in plan.clients if client.ended is not None and client.ended.error is None]
    first = np.array([client.received_at[0] - client.submit_at for client in done])
    gaps = np.concatenate([np.diff(client.received_at) for client in done]) if done else np.zeros(0)
    seconds = max((client.received_at[-1] for client in done), default=START_S) - START_S
    num_steps = sum(replica.service.counters["steps"] for replica in simulation.replicas.values())

    def percentiles(values: np.ndarray) -> dict[str, float]:
        return {f"p{q}": round(float(np.percentile(values, q)), 5) if len(values) else 0.0 for q in (50, 90, 99)}

    return {
        "requests": len(plan.clients),
        "finished": len(done),
        "refused": sum(client.refused is not None for client in plan.clients),
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(sum(len(client.received) for client in done) / seconds, 1) if seconds else 0.0,
        "ttft_s": percentiles(first),
        "inter_token_s": percentiles(gaps),
        "engine_steps": int(num_steps),
        "events": simulation.num_events,
    }
