"""All preemption modes in the simulator: each happens often, and the checks of them can fail."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from engine.runner import Batch, StepOutput
from engine.runners.host_copies import HostCopies
from engine.scheduler import failed_step
from engine.scheduler.host_pool import HostPool
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import SchedulerState
from protocol.arrays import Int32
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from simulator.scenario import ALL_FAULTS, NO_FAULTS, Faults, drawn
from simulator.simulation import Simulation
from simulator.violation import Violation

Patch = Callable[[pytest.MonkeyPatch], None]
FAILING_STEPS = Faults(step_failure=0.1)


def run(num_seeds: int, *loads: Faults) -> Counter[str]:
    """Plays seeds. Returns the counts of the engines that were there at the end."""
    counted: Counter[str] = Counter()
    for seed, faults in product(range(1, num_seeds + 1), loads):
        simulation = Simulation(drawn(seed, num_decode=1 + seed % 2, num_requests=24, faults=faults, tight=True))
        simulation.run()
        for replica in simulation.replicas.values():
            counted.update(
                {name: int(count) for name, count in replica.service.counters.items() if name.startswith("preempt")}
            )
    return counted


def test_every_mode_and_every_reason_happens() -> None:
    counted = run(30, NO_FAULTS, ALL_FAULTS, FAILING_STEPS)
    print(f"\n{dict(counted)}")
    modes, reasons = MODE_COUNTERS.values(), REASON_COUNTERS.values()
    assert sum(counted[mode] for mode in modes) == sum(counted[reason] for reason in reasons)
    assert all(counted[mode] > 20 for mode in modes)
    assert all(counted[reason] > 5 for reason in reasons)


# ---- planted bugs


def copied_out_too_late(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied out with the batch after the one that asked for it, when they have been written to."""
    waiting: dict[HostCopies, Int32 | None] = {}

    def run(self: HostCopies, batch: Batch) -> tuple[int, float]:
        batch.swap_out, waiting[self] = waiting.get(self), batch.swap_out
        return original(self, batch)

    original = HostCopies.run
    patch.setattr(HostCopies, "run", run)


def host_blocks_given_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPool, "allocate", lambda self, count: list(range(count)))
    patch.setattr(HostPool, "release", lambda self, blocks: None)


def host_blocks_free_once_copied(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Scheduler, output: StepOutput) -> object:
        batch = self._state.table.in_flight[0].batch
        if batch.swap_out is not None:
            self._state.host._free.extend(batch.swap_out[:, 1].tolist())
        return original(self, output)

    original = Scheduler.commit
    patch.setattr(Scheduler, "commit", commit)


def failed_copies_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failed_step, "_lose_copies", lambda state, host_blocks: None)


def host_blocks_kept_by_the_dead(patch: pytest.MonkeyPatch) -> None:
    def drop(self: SchedulerState, sequence: Sequence) -> None:
        if sequence.request.key in self.live:
            original(self, sequence)

    original = SchedulerState.drop_swapped
    patch.setattr(SchedulerState, "drop_swapped", drop)


@pytest.mark.parametrize(
    "plant",
    [
        copied_out_too_late,
        host_blocks_given_twice,
        host_blocks_free_once_copied,
        failed_copies_count,
        host_blocks_kept_by_the_dead,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bug_is_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        run(60, FAILING_STEPS, ALL_FAULTS, NO_FAULTS)
    print(f"\n{plant.__name__}: {caught.value}")
