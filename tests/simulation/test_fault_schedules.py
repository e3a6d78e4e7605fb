"""The real router, services and schedulers under seeded fault schedules. Bound: 60 s."""

import pytest

from bench.simulator import NO_FAULTS, Simulation, run_seeds


@pytest.mark.timeout(180)
def test_500_seeds_keep_every_invariant() -> None:
    totals = run_seeds(1, 500)
    print("\n" + ", ".join(f"{count} {name}" for name, count in totals.items()))
    assert totals["seeds"] == 500
    assert totals["requests"] >= 500 * 20
    assert totals["faults"] > totals["requests"] // 2


def test_the_same_seed_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(77, num_prefill=2, num_decode=2, logged=True)
        simulation.run()
        runs.append((simulation.num_events, simulation.clock.now, simulation.log))
    assert runs[0] == runs[1]
    assert len(runs[0][2]) > 50


@pytest.mark.parametrize("pools", [(1, 1), (0, 1), (2, 2)])
def test_without_faults_every_request_finishes_and_no_timer_fires(pools: tuple[int, int]) -> None:
    for seed in range(1, 6):
        simulation = Simulation(seed, num_prefill=pools[0], num_decode=pools[1], faults=NO_FAULTS)
        simulation.run()  # checks the timers itself
        assert simulation.num_faults == 0
        assert all(client.received == client.expected for client in simulation.clients.values() if client.refused is None)
        share = simulation.router.counters["disaggregated"] / simulation.router.counters["accepted"]
        assert share == (1.0 if pools[0] else 0.0)
