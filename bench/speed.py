"""How fast the simulator plays: engine steps a second of wall time while every decode engine runs 100 requests, without faults.

    python -m bench.simulator --speed

Measured from the moment when all requests run to the first end. Router, services and schedulers are the real ones. With the invariants
off a cheaper runner gives the same tokens of the arithmetic model: it keeps each row's sum instead of reading its cache.
"""

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.scenario import NO_FAULTS, Client, Scenario
from bench.simulation import Simulation
from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.runners.arithmetic import MULTIPLIER, PRIME, VOCAB_SIZE, ArithmeticRunner, expected_tokens
from protocol.messages import SamplingParams
from router.admission import ClientRequest
from router.config import RouterConfig

NUM_RUNNING = 100
NUM_DECODE = 2
PROMPT_TOKENS, ANSWER_TOKENS = 32, 800
BLOCK_SIZE = 16

Int64 = npt.NDArray[np.int64]


class Speed(NamedTuple):
    num_steps: int
    steps_per_s: float
    events_per_s: float


class SummingRunner(ArithmeticRunner):
    """The arithmetic model without its cache: no KV is written, a row's sum is carried from step to step.

    For runs without drafts and temperature in which a row that decodes never changes hands.
    """

    def __init__(self, cache: Int64, *, num_host_blocks: int = 0) -> None:
        super().__init__(cache, num_host_blocks=num_host_blocks)
        self._sums = np.zeros(0, np.int64)
        """[num_rows] of kv over the first `_num_summed` positions."""
        self._num_summed = np.zeros(0, np.int64)

    def execute(self, batch: Batch) -> StepOutput:
        if len(self._sums) < len(batch.token_ids):
            self._sums, self._num_summed = np.zeros((2, len(batch.token_ids)), np.int64)
        rows, start = batch.rows, batch.num_computed
        goes_on = (batch.num_scheduled == 1) & (self._num_summed[rows] == start)
        if not goes_on.all():
            self._begin(batch, np.flatnonzero(~goes_on))
            rows, start = rows[goes_on], start[goes_on]
        self._sums[rows] += (batch.token_ids[rows, start] + 1) * (start.astype(np.int64) + 1)
        self._num_summed[rows] = start + 1
        targets = self._sums[batch.rows] % PRIME * MULTIPLIER % PRIME % VOCAB_SIZE
        return StepOutput(token_ids=targets.astype(np.int32)[:, None] * batch.sample[:, None], counts=batch.sample.astype(np.int32))

    def _begin(self, batch: Batch, indices: Int64) -> None:
        """Sums up from the first token."""
        for index in indices.tolist():
            row, end = batch.rows[index], int(batch.num_computed[index] + batch.num_scheduled[index])
            tokens = batch.token_ids[row, :end].astype(np.int64)
            self._sums[row], self._num_summed[row] = ((tokens + 1) * np.arange(1, end + 1)).sum(), end


def measure(*, checked: bool, num_running: int = NUM_RUNNING, num_decode: int = NUM_DECODE) -> Speed:
    """Raises RuntimeError if a token is not the right one."""
    simulation = Simulation(scenario(num_running, num_decode, cheap=not checked), checked=checked)
    decodes = [simulation.replicas[f"decode-{index}"] for index in range(num_decode)]
    while any(replica.scheduler.num_running < num_running for replica in decodes):
        simulation.step()
    num_open, first_event, first_step = len(simulation.shell.open), simulation.num_events, _num_steps(simulation)
    started = time.perf_counter()
    while len(simulation.shell.open) == num_open:
        simulation.step()
    seconds = time.perf_counter() - started
    if any(client.received != client.expected[: len(client.received)] for client in simulation.clients.values()):
        raise RuntimeError("an answer differs")
    num_steps = _num_steps(simulation) - first_step
    return Speed(num_steps, num_steps / seconds, (simulation.num_events - first_event) / seconds)


def _num_steps(simulation: Simulation) -> int:
    return int(sum(replica.service.counters["steps"] for replica in simulation.replicas.values()))


def scenario(num_running: int = NUM_RUNNING, num_decode: int = NUM_DECODE, *, cheap: bool) -> Scenario:
    """`num_running` requests for each decode engine, all at once, and one prefill engine that feeds them."""
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
        request = ClientRequest(request_id=f"r{index}", prompt_token_ids=prompt, max_tokens=ANSWER_TOKENS, sampling=SamplingParams())
        clients.append(Client(request, expected_tokens(prompt.tolist(), ANSWER_TOKENS), submit_at=1.0))
    return clients


def report() -> str:
    off, on = measure(checked=False), measure(checked=True)
    load = f"{NUM_DECODE} decode engines with {NUM_RUNNING} running requests each"
    return (
        f"{load}: {off.steps_per_s:,.0f} engine steps/s ({off.events_per_s:,.0f} events/s) with the invariants off, "
        f"{on.steps_per_s:,.0f} with them on and every KV entry computed"
    )
