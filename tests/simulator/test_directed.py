"""Scenarios with one purpose each: the two deadlock cycles, processes that come and go, clients that stop reading,
bytes that change.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig, Knob
from engine.runners.arithmetic_model import expected_tokens
from engine.scheduler.admission import seat_arrived
from engine.scheduler.state import SchedulerState
from kv_transfer.transports.local import LocalPull
from protocol.errors import RequestCancelled, RequestFailed
from protocol.messages import EngineRequest, Envelope, SamplingParams
from router.admission import ClientRequest
from router.config import RouterConfig
from simulator.engines import Engines
from simulator.scenario import ALL_FAULTS, MODES, NO_FAULTS, TRANSFER, Client, Faults, Scenario, drawn
from simulator.simulation import Simulation
from simulator.violation import Violation
from simulator.wire import Wire

BLOCK_SIZE = 4


def clients(count: int, num_prompt: int, num_tokens: int) -> list[Client]:
    """All at once, when every engine has told its load; no two prompts share a block."""
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
    """One engine of each pool, quick and even. `prefill`, `decode`: knobs of theirs."""
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
    """Runs it to its end; returns after how many events `seen` held."""
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


# ---- the two cycles


def cycle_behind_the_head() -> Simulation:
    """Four answers outgrow the decode engine: evicted ones come to head the queue while others arrive behind them."""
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
    """Requests wait at prefill, whose blocks belong to leases of prompts that decode has no room for."""
    prefill, decode = simulation.replicas["prefill-0"], simulation.replicas["decode-0"]
    full = (
        prefill.scheduler.num_waiting > 0
        and prefill.scheduler.num_running == 0
        and prefill.scheduler.num_free_blocks < 2
    )
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
    """Prompts around it: up to 63 go through the prefill engine, 64 and 65 to decode alone; all get their 20 tokens."""
    load = [clients(1, num_prompt=num_prompt, num_tokens=20)[0] for num_prompt in (62, 63, 64, 65)]
    for index, client in enumerate(load):
        client.request = replace(client.request, request_id=f"r{index}", cache_salt=f"{index}")
    simulation = Simulation(scenario(load, prefill_blocks=40, decode_blocks=99, prefill={"max_model_len": 64}))
    simulation.run()
    assert all_right(simulation)
    assert (simulation.router.counters["disaggregated"], simulation.router.counters["colocated"]) == (2, 2)


def test_what_has_outgrown_prefill_is_not_returned_to_it() -> None:
    """Eight answers of 30 in a pool for five: those that prefill's 24 tokens can no longer hold are computed again at
    decode.
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
    """Prefill takes 16 tokens in one step or none; an answer that was returned and is longer by now is cut there."""
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
    """First attempts reach decode later than the handoffs of their prompts do."""

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
    """One channel, and its first pull moves only when it is asked to end; by then nobody wants it any more."""
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
    """The same prompt twice, over two prefill engines that both compute it all."""
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
    """Nothing is pulled, so no event comes after its last handoff: the engine must not wait for its next tick."""
    load = clients(1, num_prompt=8, num_tokens=5)
    again = replace(load[0].request, request_id="again")
    load.append(Client(again, load[0].expected, submit_at=4.03))
    simulation = Simulation(scenario(load, prefill_blocks=20, decode_blocks=20))
    simulation.run()
    assert simulation.replicas["decode-0"].service.counters["pulls"] == 1
    assert all_right(simulation)
    assert max(np.diff(load[1].received_at)) < 0.01


# ---- processes that come and go


def runs(faults: Faults, num_seeds: int, num_each: int) -> list[Simulation]:
    """Played, with `num_each` engines in each pool at the start."""
    seeds = range(1, num_seeds + 1)
    made = [
        Simulation(drawn(seed, num_prefill=num_each, num_decode=num_each, num_requests=30, faults=faults), logged=True)
        for seed in seeds
    ]
    for simulation in made:
        simulation.run()
    return made


def test_drains_and_scaling_lose_nothing() -> None:
    """Told by the router or by their own process, engines leave: no request fails, and every answer is whole."""
    simulations = runs(Faults(drains=2, scale_ups=2, scale_downs=2), 30, 2)
    lines = "\n".join(line for simulation in simulations for line in simulation.log)
    assert min(lines.count(f"  {what} ") for what in ("drain", "stop", "scale up", "scale down")) > 10
    for simulation in simulations:
        for client in simulation.clients.values():
            if client.ended is not None:
                assert client.ended.error is None, (simulation.seed, client.ended)
            elif not isinstance(client.refused, RequestFailed):  # strict, and both prefill engines are on their way out
                assert client.refused is not None


def test_a_pool_grows_and_shrinks() -> None:
    simulations = runs(Faults(scale_ups=2, scale_downs=1), 20, 1)
    sizes = {
        (name.partition("-")[0], len([n for n in s.replicas if n.startswith(name[:6])]))
        for s in simulations
        for name in s.replicas
    }
    assert {("decode", 2), ("prefill", 2)} <= sizes
    grown = [s for s in simulations if {"decode-0", "decode-1"} <= set(s.replicas)]
    assert any(s.replicas["decode-1"].service.counters["requests"] for s in grown)
    assert any(set(s.replicas) != {"prefill-0", "decode-0"} and "decode-0" not in s.replicas for s in simulations)


# ---- clients that stop reading


def test_a_client_that_stops_reading_harms_only_itself() -> None:
    load = clients(6, num_prompt=8, num_tokens=30)
    load[2].stops_after, load[4].stops_after = 5, 28
    planned = scenario(load, prefill_blocks=60, decode_blocks=60)
    simulation = Simulation(
        replace(planned, router=RouterConfig(max_buffered_tokens=8, write_timeout_s=0.2)), logged=True
    )
    simulation.run()
    stuck, late = load[2], load[4]
    assert (
        stuck.ended is not None
        and isinstance(stuck.ended.error, RequestCancelled)
        and "too slowly" in str(stuck.ended.error)
    )
    assert stuck.received == stuck.expected[: len(stuck.received)] and 13 < len(stuck.received) <= 15
    assert late.ended is not None and late.ended.error is None  # its last tokens fit into the buffer
    assert all(client.received == client.expected for client in load if client is not stuck)


def test_a_client_that_takes_nothing_for_too_long_loses_its_stream() -> None:
    load = clients(1, num_prompt=8, num_tokens=80)
    load[0].stops_after = 5
    planned = scenario(load, prefill_blocks=60, decode_blocks=60)
    simulation = Simulation(replace(planned, router=RouterConfig(write_timeout_s=0.05)), logged=True)
    simulation.run()
    assert load[0].ended is not None and isinstance(load[0].ended.error, RequestCancelled)
    assert 5 < len(load[0].received) < 80
    assert any("write timeout" in line for line in simulation.log)


# ---- bytes that change


def test_changed_bytes_fail_the_attempt_and_never_the_answer() -> None:
    num_flipped = num_mismatches = 0
    for seed in range(1, 16):
        planned = drawn(seed, num_decode=2, num_requests=30, faults=Faults(corruption=0.2))
        router = replace(planned.router, disaggregation=MODES[1])
        simulation = Simulation(replace(planned, router=router, transfer=replace(TRANSFER, checksum=True)), logged=True)
        simulation.run()
        num_flipped += sum("is flipped" in line for line in simulation.log)
        num_mismatches += sum(int(r.service.counters.get("checksum_failures", 0)) for r in simulation.replicas.values())
        assert all(
            client.received == client.expected for client in simulation.clients.values() if client.refused is None
        )
    assert 50 < num_mismatches <= num_flipped  # of one pull two bits may be flipped


# ---- strict


def test_strict_refuses_rather_than_falls_back() -> None:
    """Without a prefill engine at all, and while it is away."""
    planned = drawn(3, num_prefill=0, num_decode=1, faults=NO_FAULTS)
    simulation = Simulation(replace(planned, router=replace(planned.router, disaggregation="strict")))
    simulation.run()
    assert all(client.refused is not None for client in simulation.clients.values())
    num_refused = 0
    for seed in range(1, 11):
        planned = drawn(seed, faults=replace(ALL_FAULTS, kills=4))
        simulation = Simulation(
            replace(planned, router=replace(planned.router, disaggregation="strict", min_disaggregated_tokens=0))
        )
        simulation.run()
        num_refused += sum("strict" in str(client.refused) for client in simulation.clients.values())
        assert simulation.router.counters["colocated"] == 0
    assert num_refused > 5
