"""A quick and even scenario without faults, for tests that look at one thing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import EngineConfig, Knob
from engine.runners.arithmetic_model import expected_tokens
from protocol.messages import SamplingParams
from router.admission import ClientRequest
from router.config import RouterConfig
from simulator.scenario import NO_FAULTS, Client, Scenario
from simulator.simulation import Simulation

BLOCK_SIZE = 4


def clients(count: int, num_prompt: int, num_tokens: int) -> list[Client]:
    """Clients that come all at once, when every engine has told its load. No two prompts share a block."""
    made = []
    for index in range(count):
        prompt = [1000 * (index + 1) + position for position in range(num_prompt)]
        request = ClientRequest(
            request_id=f"r{index}",
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        made.append(Client(request, expected_tokens(prompt, num_tokens), submit_at=2.5))
    return made


def scenario(
    load: list[Client],
    *,
    prefill_blocks: int,
    decode_blocks: int,
    max_num_seqs: int = 8,
    preemption: Knob = "recompute",
    num_prefill: int = 1,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> Scenario:
    """One engine of each pool, quick and even. `prefill` and `decode` are knobs of the two."""
    engine = EngineConfig(
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=96,
        block_size=BLOCK_SIZE,
        num_blocks=prefill_blocks + 1,
        thrash_limit=0,
    )
    return Scenario(
        seed=1,
        num_prefill=num_prefill,
        num_decode=1,
        prefill=replace(engine, prompt_reservation="hold", **(prefill or {})),
        decode=replace(
            engine, num_blocks=decode_blocks + 1, max_num_seqs=max_num_seqs, preemption=preemption, **(decode or {})
        ),
        router=RouterConfig(max_attempts=1),
        clients=load,
        faults=NO_FAULTS,
        step_seconds=lambda batch: 0.002,
        wire_seconds=lambda: 0.001,
        block_seconds=lambda: 0.0005,
        copy_block_s=0.0001,
        horizon_s=60.0,
    )


def play(simulation: Simulation, seen: Callable[[Simulation], bool]) -> int:
    """Runs a simulation to its end. Returns after how many events `seen` was true."""
    count = 0
    while simulation.driver.open or not simulation.engines.quiet:
        simulation.step()
        count += seen(simulation)
    simulation.run()  # the checks at the end
    return count


def all_right(simulation: Simulation) -> bool:
    return all(
        client.received == client.expected and client.ended is not None for client in simulation.clients.values()
    )
