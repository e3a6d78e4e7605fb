"""One kind of trouble at a time: processes come and go, clients stop reading, bytes change, prefill is away."""

from dataclasses import replace

from protocol.errors import RequestCancelled, RequestFailed
from router.config import RouterConfig
from simulator.scenario import ALL_FAULTS, MODES, NO_FAULTS, TRANSFER, Faults, drawn
from simulator.simulation import Simulation
from tests.simulator.even_scenario import all_right, clients, play, scenario

# ---- processes that come and go


def runs(faults: Faults, num_seeds: int, num_each: int) -> list[Simulation]:
    """Plays `num_seeds` seeds, with `num_each` engines in each pool at the start."""
    seeds = range(1, num_seeds + 1)
    made = [
        Simulation(drawn(seed, num_prefill=num_each, num_decode=num_each, num_requests=30, faults=faults), logged=True)
        for seed in seeds
    ]
    for simulation in made:
        simulation.run()
    return made


def test_drains_and_scaling_lose_nothing() -> None:
    """Engines leave, told by the router or by their own process: no request fails, and every answer is whole."""
    simulations = runs(Faults(drains=2, scale_ups=2, scale_downs=2), 30, 2)
    lines = "\n".join(line for simulation in simulations for line in simulation.log)
    assert min(lines.count(f"  {what} ") for what in ("drain", "stop", "scale up", "scale down")) > 10
    for simulation in simulations:
        for client in simulation.clients.values():
            if client.ended is not None:
                assert client.ended.error is None, (simulation.seed, client.ended)
            elif not isinstance(client.refused, RequestFailed):  # strict, and both prefill engines are on their way out
                assert client.refused is not None


def test_an_administrators_orders_cost_no_attempt() -> None:
    """What a drained engine has ends there. Only where the last one of a pool is drained are requests refused."""
    simulations = runs(Faults(orders=4), 20, 2)
    lines = "\n".join(line for simulation in simulations for line in simulation.log)
    assert lines.count("order: drain") > 40 and lines.count("order: undrain") > 20
    num_refused = 0
    for simulation in simulations:
        assert simulation.router.counters["retries"] == 0
        for client in simulation.clients.values():
            if client.ended is not None:
                assert client.ended.error is None, (simulation.seed, client.ended)
            elif isinstance(client.refused, RequestFailed):
                assert "those that are there drain" in str(client.refused)
                num_refused += 1
    assert num_refused > 0


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


# ---- peers that open late, or not at all


def test_peers_that_open_late_or_never_cost_attempts_and_no_answer() -> None:
    simulations = runs(Faults(connect_stall=0.5, connect_failure=0.2, kills=3, router_kills=1), 20, 2)
    lines = "\n".join(line for simulation in simulations for line in simulation.log)
    assert min(lines.count(what) for what in ("opening a peer takes", "a peer cannot be opened")) > 10
    failures = timers = 0.0
    for simulation in simulations:
        for client in simulation.clients.values():
            if client.ended is not None and client.ended.error is None:
                assert client.received == client.expected
        for replica in simulation.replicas.values():
            failures += replica.service.counters.get("pull_failures", 0)
            timers += 0 if replica.is_prefill else replica.service.counters["timers_fired"]
    assert failures > 20 and timers > 0


def test_the_first_prompts_wait_for_their_peer() -> None:
    load = clients(6, num_prompt=8, num_tokens=10)
    planned = replace(scenario(load, prefill_blocks=60, decode_blocks=60), connect_seconds=lambda: 3.0)
    simulation = Simulation(planned)
    num_waiting = play(simulation, lambda now: bool(now.engines.network.connections) and now.queue.clock.now > 2.6)
    assert num_waiting > 10 and all_right(simulation)
    assert min(client.received_at[1] for client in load) > 3.0
    assert simulation.replicas["decode-0"].service.counters["pulls"] >= 6


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
    assert stuck.ended is not None and isinstance(stuck.ended.error, RequestCancelled)
    assert "too slowly" in str(stuck.ended.error)
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
    assert 50 < num_mismatches <= num_flipped  # two bits of one pull may be flipped


# ---- strict


def test_strict_refuses_rather_than_falls_back() -> None:
    """It does so without a prefill engine at all, and while the prefill engine is away."""
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
