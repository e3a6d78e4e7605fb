"""Thousands of seeded fault schedules: the real router, services and schedulers under a virtual clock (simulation.py).

    python -m simulator --first-seed 1 --seeds 500      exits with 1 and names the seed at the first broken invariant
    python -m simulator --speed                         prints engine steps per second, without faults

A seed stands for a run with its sizes and faults; `twopass simulate --seed N --replay` shows it.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import NoReturn

from simulator.scenario import ALL_FAULTS, NO_FAULTS, drawn
from simulator.simulation import Simulation
from simulator.speed import report
from simulator.violation import Violation

POOLS = ((1, 1), (2, 2), (1, 3), (0, 2), (2, 1), (2, 3))
"""Numbers of (prefill, decode) engines of a drawn run."""
DOORS = (0, 0, 0, 1, 2, 3)
"""Numbers of doors in processes of their own."""
PROGRESS_SEEDS = 5_000
"""After how many seeds a long run says how far it is."""


def of_seed(seed: int, *, logged: bool = False) -> Simulation:
    """The run that a seed stands for: 2 to 5 engines, 40 to 50 requests, for one seed in two up to three doors in
    processes of their own, and for one in five no faults.
    """
    draw = random.Random(f"sizes {seed}")
    num_prefill, num_decode = draw.choice(POOLS)
    faults = NO_FAULTS if draw.random() < 0.2 else ALL_FAULTS
    scenario = drawn(
        seed,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_doors=random.Random(f"doors {seed}").choice(DOORS),
        num_requests=draw.randint(40, 50),
        faults=faults,
    )
    return Simulation(scenario, logged=logged)


def show_seed(seed: int, show: Callable[[str], None]) -> bool:
    """Runs one seed, shows its log and prints a verdict. Returns False if it broke an invariant."""
    simulation = of_seed(seed, logged=True)
    verdict = "no violation"
    try:
        simulation.run()
    except Violation as violation:
        verdict = str(violation)
    for line in simulation.log:
        show(line)
    print(
        f"seed {seed}: {len(simulation.clients)} requests, {simulation.num_faults} faults, {simulation.num_events} "
        f"events: {verdict}"
    )
    return verdict == "no violation"


def run_seed(seed: int) -> Counter[str]:
    """Runs one seed and counts. Raises Violation if the run breaks an invariant."""
    simulation = of_seed(seed)
    simulation.run()
    return Counter(
        seeds=1, requests=len(simulation.clients), faults=simulation.num_faults, events=simulation.num_events
    )


def run_seeds(first_seed: int, num_seeds: int, *, processes: int = 1) -> Counter[str]:
    """Runs seeds and sums up their counts. Raises Violation at the first seed that breaks an invariant."""
    seeds = range(first_seed, first_seed + num_seeds)
    if processes == 1:
        return added_up(map(run_seed, seeds))
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        return added_up(pool.map(run_seed, seeds, chunksize=20))
    finally:
        pool.shutdown(cancel_futures=True)  # an exception may come while many seeds still wait for a process


def added_up(counts: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of the counts. Long runs say on stderr how far they are."""
    totals: Counter[str] = Counter()
    for count in counts:
        totals.update(count)
        if totals["seeds"] % PROGRESS_SEEDS == 0:
            print(in_words(totals), file=sys.stderr, flush=True)
    return totals


def in_words(totals: Counter[str]) -> str:
    return ", ".join(f"{totals[name]} {name}" for name in ("seeds", "requests", "faults", "events"))


def end(number: int, frame: object) -> NoReturn:
    """Ends the process at a signal. No worker outlives it, and none that has just been started waits for work while the
    process waits for its end.
    """
    for worker in active_children():
        worker.terminate()
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m simulator", description="Run seeded fault schedules; exit 1 at the first violation."
    )
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--speed", action="store_true", help="Instead: engine steps a second, without faults.")
    arguments = parser.parse_args()
    if arguments.speed:
        print(report())
        return
    signal.signal(signal.SIGTERM, end)
    started = time.perf_counter()
    try:
        totals = run_seeds(arguments.first_seed, arguments.seeds, processes=arguments.processes)
    except Violation as violation:
        print(violation)
        print(f"twopass simulate --seed {violation.seed} --replay shows it")
        sys.exit(1)
    seconds = time.perf_counter() - started
    print(f"{in_words(totals)}, no violation, {seconds:.1f} s")
