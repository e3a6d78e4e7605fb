"""How fast the simulator plays: engine steps per second of wall time while every decode engine runs 100 requests,
without faults.

    python -m simulator --speed

It measures from the moment when all requests run until the first one ends. Router, services and schedulers are the
real ones. With the invariants off, a cheaper runner gives the same tokens of the arithmetic model: it keeps the sum of
each row instead of reading its cache. It measures one process, then as many as there are cores, as `python -m
simulator` plays seeds.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import VOCAB_SIZE, expected_tokens
from protocol.messages import SamplingParams
from router.admission import ClientRequest
from router.config import RouterConfig
from simulator.scenario import NO_FAULTS, Client, Scenario
from simulator.simulation import Simulation
from simulator.summing_runner import SummingRunner

NUM_RUNNING = 100
NUM_DECODE = 2
PROMPT_TOKENS, ANSWER_TOKENS = 32, 800
BLOCK_SIZE = 16
NUM_ROUNDS = 5


class Speed(NamedTuple):
    num_steps: int
    steps_per_s: float
    events_per_s: float


def measure(*, checked: bool, num_running: int = NUM_RUNNING, num_decode: int = NUM_DECODE) -> Speed:
    """Plays one round. Raises RuntimeError if a token is not the right one."""
    simulation = Simulation(scenario(num_running, num_decode, cheap=not checked), checked=checked)
    decodes = [simulation.replicas[f"decode-{index}"] for index in range(num_decode)]
    while any(replica.scheduler.num_running < num_running for replica in decodes):
        simulation.step()
    num_open, first_event, first_step = len(simulation.driver.open), simulation.num_events, _num_steps(simulation)
    started = time.perf_counter()
    while len(simulation.driver.open) == num_open:
        simulation.step()
    seconds = time.perf_counter() - started
    if any(client.received != client.expected[: len(client.received)] for client in simulation.clients.values()):
        raise RuntimeError("an answer differs")
    num_steps = _num_steps(simulation) - first_step
    return Speed(num_steps, num_steps / seconds, (simulation.num_events - first_event) / seconds)


def _num_steps(simulation: Simulation) -> int:
    return int(sum(replica.service.counters["steps"] for replica in simulation.replicas.values()))


def scenario(num_running: int = NUM_RUNNING, num_decode: int = NUM_DECODE, *, cheap: bool) -> Scenario:
    """`num_running` requests for each decode engine, all at once, and one prefill engine for their prompts."""
    blocks_each = (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE + 1
    engine = EngineConfig(
        max_num_batched_tokens=2048,
        max_num_seqs=num_running,
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
        block_size=BLOCK_SIZE,
        num_blocks=num_running * blocks_each + 1,
    )
    return Scenario(
        seed=1,
        num_prefill=1,
        num_decode=num_decode,
        prefill=replace(engine, prompt_reservation="hold"),
        decode=engine,
        router=RouterConfig(max_queue=num_running * num_decode),
        clients=_clients(num_running * num_decode),
        faults=NO_FAULTS,
        step_seconds=lambda batch: 0.01,
        wire_seconds=lambda: 0.0005,
        block_seconds=lambda: 0.0001,
        copy_block_s=0.0001,
        runner=SummingRunner if cheap else ArithmeticRunner,
    )


def _clients(count: int) -> list[Client]:
    draw, clients = np.random.default_rng(1), []
    for index in range(count):
        prompt = draw.integers(0, VOCAB_SIZE, PROMPT_TOKENS).astype(np.int32)
        request = ClientRequest(
            request_id=f"r{index}", prompt_token_ids=prompt, max_tokens=ANSWER_TOKENS, sampling=SamplingParams()
        )
        clients.append(Client(request, expected_tokens(prompt.tolist(), ANSWER_TOKENS), submit_at=1.0))
    return clients


def steps_per_s(checked: bool) -> float:
    """The best of `NUM_ROUNDS`. A round takes a fraction of a second, and other processes can only slow it down."""
    return max(measure(checked=checked).steps_per_s for _ in range(NUM_ROUNDS))


def steps_per_s_of_all(num_processes: int, *, checked: bool) -> float:
    """The sum over processes that work at the same time, each on a simulation of its own, as for seeds."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(steps_per_s, [checked] * num_processes))


def report() -> str:
    num_processes = os.cpu_count() or 1
    one = [steps_per_s(checked) for checked in (False, True)]
    every = [steps_per_s_of_all(num_processes, checked=checked) for checked in (False, True)]
    lines = [
        f"engine steps/s, {NUM_DECODE} decode engines with {NUM_RUNNING} running requests each, best of {NUM_ROUNDS} "
        "rounds",
        f"{'invariants':30} {'off':>8} {'on':>8}",
    ]
    for name, (off, on) in (("one process", one), (f"{num_processes} processes, one per core", every)):
        lines.append(f"{name:30} {off:8,.0f} {on:8,.0f}")
    return "\n".join(lines)
