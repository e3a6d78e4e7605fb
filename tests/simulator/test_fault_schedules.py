"""The real router, services, schedulers and doors under seeded fault schedules: two minutes on two slow cores. Runs
of more seeds are for `python -m simulator`.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_pool.service import PrefillService
from simulator import seeds
from simulator.scenario import NO_FAULTS, drawn
from simulator.seeds import of_seed, run_seeds
from simulator.simulation import Simulation
from simulator.violation import Violation

ROOT = Path(__file__).parents[2]
NUM_SEEDS = 800


def test_800_seeds_keep_every_invariant() -> None:
    totals = run_seeds(1, NUM_SEEDS, processes=os.cpu_count() or 1)
    print("\n" + ", ".join(f"{count} {name}" for name, count in totals.items()))
    assert totals["seeds"] == NUM_SEEDS
    assert totals["requests"] >= NUM_SEEDS * 40
    assert totals["faults"] > totals["requests"] // 3


def test_a_long_run_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(seeds, "PROGRESS_SEEDS", 2)
    totals = run_seeds(1, 3)
    assert totals["seeds"] == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("2 seeds, ") and line.endswith(" events")


def test_the_same_seed_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        simulation = of_seed(77, logged=True)
        simulation.run()
        runs.append((simulation.num_events, simulation.queue.clock.now, simulation.log))
    assert runs[0] == runs[1]
    assert len(runs[0][2]) > 100


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    """It does not depend on the order that the hashes of strings give to sets."""
    command = [sys.executable, "-m", "twopass", "simulate", "--seed", "13", "--replay"]
    logs = [
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") > 100


def test_a_violation_reaches_the_parent_of_the_process_that_found_it() -> None:
    violation = Violation(5, 1.5, "I1: something")
    copy = pickle.loads(pickle.dumps(violation))
    assert (copy.seed, str(copy)) == (5, str(violation)) == (5, "seed 5, 1.5000 s: I1: something")


def test_the_command_ends_with_one_and_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PrefillService, "_on_release", lambda self, envelope: None)  # a bug that seed 8 finds
    monkeypatch.setattr(sys, "argv", ["simulator", "--first-seed", "8", "--seeds", "1", "--processes", "1"])
    with pytest.raises(SystemExit) as ended:
        seeds.main()
    assert ended.value.code == 1
    assert "seed 8, " in (said := capsys.readouterr().out) and "twopass simulate --seed 8 --replay" in said
    lines: list[str] = []
    assert not seeds.show_seed(8, lines.append)
    assert len(lines) > 100 and "seed 8, " in capsys.readouterr().out


@pytest.mark.parametrize("pools", [(1, 1), (0, 1), (2, 2)])
def test_without_faults_every_request_finishes_and_no_timer_fires(pools: tuple[int, int]) -> None:
    for seed in range(1, 6):
        simulation = Simulation(drawn(seed, num_prefill=pools[0], num_decode=pools[1], faults=NO_FAULTS))
        simulation.run()  # checks the timers itself
        assert simulation.num_faults == 0
        assert all(
            client.received == client.expected for client in simulation.clients.values() if client.refused is None
        )
        share = simulation.router.counters["disaggregated"] / simulation.router.counters["accepted"]
        assert (share >= 1.0) == (pools[0] > 0 and simulation.scenario.router.disaggregation != "colocated")
