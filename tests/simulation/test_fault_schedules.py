"""The real router, services and schedulers under seeded fault schedules. Bound: 3 minutes on two cores."""

import os

import pytest

from bench.scenario import NO_FAULTS, drawn
from bench.simulator import Simulation, of_seed, run_seeds

NUM_SEEDS = 2000


@pytest.mark.timeout(600)
def test_2000_seeds_keep_every_invariant() -> None:
    totals = run_seeds(1, NUM_SEEDS, processes=os.cpu_count() or 1)
    print("\n" + ", ".join(f"{count} {name}" for name, count in totals.items()))
    assert totals["seeds"] == NUM_SEEDS
    assert totals["requests"] >= NUM_SEEDS * 40
    assert totals["faults"] > totals["requests"] // 3


def test_the_same_seed_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        simulation = of_seed(77, logged=True)
        simulation.run()
        runs.append((simulation.num_events, simulation.clock.now, simulation.log))
    assert runs[0] == runs[1]
    assert len(runs[0][2]) > 100


@pytest.mark.parametrize("pools", [(1, 1), (0, 1), (2, 2)])
def test_without_faults_every_request_finishes_and_no_timer_fires(pools: tuple[int, int]) -> None:
    for seed in range(1, 6):
        simulation = Simulation(drawn(seed, num_prefill=pools[0], num_decode=pools[1], faults=NO_FAULTS))
        simulation.run()  # checks the timers itself
        assert simulation.num_faults == 0
        assert all(client.received == client.expected for client in simulation.clients.values() if client.refused is None)
        share = simulation.router.counters["disaggregated"] / simulation.router.counters["accepted"]
        assert (share >= 1.0) == bool(pools[0])
