"""Scenarios with one purpose each: the two deadlock cycles, limits of one engine, and what is cached at both ends."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine.scheduler.admission import seat_arrived
from engine.scheduler.state import SchedulerState
from kv_transfer.transports.local import LocalPull
from protocol.errors import RequestCancelled
from protocol.messages import EngineRequest, Envelope
from router.config import RouterConfig
from simulator.engines import Engines
from simulator.scenario import TRANSFER, Client
from simulator.simulation import Simulation
from simulator.violation import Violation
from simulator.wire import Wire
from tests.simulator.even_scenario import all_right, clients, play, scenario

# ---- the two cycles


def cycle_behind_the_head() -> Simulation:
    """Four answers outgrow the decode engine: evicted ones become the head of the queue while others
    arrive behind them.
    """
    return Simulation(
        scenario(clients(8, num_prompt=8, num_tokens=30), prefill_blocks=24, decode_blocks=16, max_num_seqs=2)
    )


def head_wants_what_arrived_ones_hold(simulation: Simulation) -> bool:
    state: SchedulerState = simulation.replicas["decode-0"].scheduler._state
    head = state.waiting.head()
    if head is None or not state.arrived:
        return False
    lacking = state.num_blocks(len(head.tokens)) - state.blocks.num_free
    return 0 < lacking <= sum(len(sequence.blocks) for sequence in state.arrived)


def test_arrived_sequences_pass_a_head_that_needs_their_blocks() -> None:
    simulation = cycle_behind_the_head()
    assert play(simulation, head_wants_what_arrived_ones_hold) > 10
    assert all_right(simulation)
    assert simulation.router.counters["retries"] == 0


def test_if_they_queued_behind_it_nothing_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.scheduler.scheduler.seat_arrived",
        lambda state, budget: [] if len(state.waiting) else seat_arrived(state, budget),
    )
    with pytest.raises(Violation, match="I9"):
        cycle_behind_the_head().run()


def prefill_is_full_of_leases(simulation: Simulation) -> bool:
    """True if requests wait at prefill, whose blocks belong to leases of prompts that decode has no room for."""
    prefill, decode = simulation.replicas["prefill-0"], simulation.replicas["decode-0"]
    stuck = prefill.scheduler.num_waiting > 0 and prefill.scheduler.num_running == 0
    full = stuck and prefill.scheduler.num_free_blocks < 2
    return full and decode.scheduler.num_waiting > 0 and simulation.router.counters["returned"] > 0


def test_decode_returns_sequences_to_a_prefill_pool_that_is_full_of_leases() -> None:
    load = clients(10, num_prompt=8, num_tokens=30)
    simulation = Simulation(scenario(load, prefill_blocks=10, decode_blocks=16, max_num_seqs=6, preemption="remote"))
    assert play(simulation, prefill_is_full_of_leases) > 10
    assert all_right(simulation)
    assert simulation.router.counters["returned"] > 0
    assert simulation.router.counters["retries"] == 0


# ---- limits of one engine, and promises of the deployment


def test_prefills_length_limit_ends_no_answer() -> None:
    """Prompts are around the limit: up to 63 tokens go through the prefill engine, 64 and 65 to decode alone. All get
    their 20 tokens.
    """
    load = [clients(1, num_prompt=num_prompt, num_tokens=20)[0] for num_prompt in (62, 63, 64, 65)]
    for index, client in enumerate(load):
        client.request = replace(client.request, request_id=f"r{index}", cache_salt=f"{index}")
    simulation = Simulation(scenario(load, prefill_blocks=40, decode_blocks=99, prefill={"max_model_len": 64}))
    simulation.run()
    assert all_right(simulation)
    assert (simulation.router.counters["disaggregated"], simulation.router.counters["colocated"]) == (2, 2)


def test_what_has_outgrown_prefill_is_not_returned_to_it() -> None:
    """Eight answers of 30 tokens are in a pool for five. Those that have outgrown prefill's limit of 24 tokens are
    computed again at decode.
    """
    load = clients(8, num_prompt=8, num_tokens=30)
    planned = scenario(load, prefill_blocks=40, decode_blocks=40, preemption="remote", prefill={"max_model_len": 24})
    simulation = Simulation(planned)
    simulation.run()
    assert all_right(simulation)
    counters = simulation.replicas["decode-0"].service.counters
    assert counters["preemption_reason_no_room"] > 0
    assert simulation.router.counters["colocated"] == 0


def test_without_chunks_a_long_prompt_goes_where_it_is_computed() -> None:
    """Prefill takes 16 tokens in one step or none. An answer that was returned and is longer by now is cut there."""
    load = [*clients(4, num_prompt=12, num_tokens=30), *clients(6, num_prompt=17, num_tokens=30)[4:]]
    planned = scenario(
        load, prefill_blocks=40, decode_blocks=26, preemption="remote", prefill={"enable_chunked_prefill": False}
    )
    simulation = Simulation(planned)
    simulation.run()
    assert all_right(simulation)
    counters = simulation.router.counters
    assert (counters["retries"], counters["colocated"]) == (0, 2) and counters["returned"] > 0


def test_a_full_table_of_early_handoffs_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """First attempts reach decode later than the handoffs of their prompts."""

    def send(self: Wire, envelope: Envelope) -> None:
        message = envelope.message
        late = isinstance(message, EngineRequest) and message.role == "decode" and message.key.attempt == 1
        self._queue.at(0.1 if late else 0.001, partial(self._arrive, envelope))

    monkeypatch.setattr(Wire, "send", send)
    planned = scenario(clients(6, num_prompt=8, num_tokens=10), prefill_blocks=80, decode_blocks=80, max_num_seqs=16)
    simulation = Simulation(replace(planned, transfer=replace(TRANSFER, max_early_handoffs=1)), logged=True)
    simulation.run()
    assert all_right(simulation)
    assert any("refused early handoffs are full" in line for line in simulation.log)
    assert simulation.router.counters["returned"] >= 5 and simulation.router.counters["retries"] == 0


def test_who_waits_behind_a_stalled_pull_of_a_request_that_has_ended_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one channel, and its first pull moves only when it is asked to end. By then nobody wants it any more."""
    pulls: list[LocalPull] = []

    def move(self: Engines, pull: LocalPull) -> None:
        if not pulls:
            pulls.append(pull)
            self._stalled.add(pull)
        else:
            original(self, pull)

    original = Engines._move
    monkeypatch.setattr(Engines, "_move", move)
    load = clients(3, num_prompt=8, num_tokens=10)
    load[0].cancel_after_s = 0.5
    planned = replace(scenario(load, prefill_blocks=40, decode_blocks=40), num_channels=1, router=RouterConfig())
    simulation = Simulation(planned)
    simulation.run()  # until nothing is held
    assert pulls[0].error == "cancelled"
    assert load[0].ended is not None and isinstance(load[0].ended.error, RequestCancelled)
    assert all(client.ended is not None and client.received == client.expected for client in load[1:])


# ---- what is cached at both ends


def cached_tokens(simulation: Simulation) -> list[int]:
    return [client.ended.usage.cached_tokens for client in simulation.clients.values() if client.ended is not None]


def test_what_decode_has_of_a_prompt_is_not_told_as_cached() -> None:
    """The same prompt comes twice, over two prefill engines that both compute all of it."""
    load = clients(1, num_prompt=40, num_tokens=5)
    load.append(Client(replace(load[0].request, request_id="again"), load[0].expected, submit_at=4.0))
    planned = scenario(load, prefill_blocks=40, decode_blocks=40, num_prefill=2)
    simulation = Simulation(replace(planned, router=RouterConfig(policy="round_robin")))
    simulation.run()
    assert all_right(simulation) and cached_tokens(simulation) == [0, 0]
    assert [simulation.replicas[f"prefill-{index}"].service.counters["prompt_tokens"] for index in range(2)] == [40, 40]


def test_cold_prompts_that_are_returned_stay_cold() -> None:
    load = clients(4, num_prompt=28, num_tokens=30)
    simulation = Simulation(scenario(load, prefill_blocks=80, decode_blocks=40, preemption="remote"))
    simulation.run()
    assert all_right(simulation) and cached_tokens(simulation) == [0, 0, 0, 0]
    assert simulation.router.counters["returned"] > 0
    counters = simulation.replicas["prefill-0"].service.counters
    assert (counters["prefix_query_tokens"], counters["cached_tokens"]) == (112, 0)
    assert counters["redispatched_query_tokens"] > 0


def test_a_prompt_that_decode_has_whole_is_decoded_at_once() -> None:
    """Nothing is pulled, so no event follows its last handoff: the engine must not wait for its next tick."""
    load = clients(1, num_prompt=8, num_tokens=5)
    again = replace(load[0].request, request_id="again")
    load.append(Client(again, load[0].expected, submit_at=4.03))
    simulation = Simulation(scenario(load, prefill_blocks=20, decode_blocks=20))
    simulation.run()
    assert simulation.replicas["decode-0"].service.counters["pulls"] == 1
    assert all_right(simulation)
    assert max(np.diff(load[1].received_at)) < 0.01
