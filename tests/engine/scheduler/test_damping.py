"""An overload of 2,000 steps with far more seats than the KV has room for. Damping must cost little and avoid most of
the recomputing.
"""

import numpy as np
import pytest

from engine.scheduler.thrash import ThrashMeter
from protocol.clock import VirtualClock
from tests.engine.scheduler.timed_engine import Engine

NUM_STEPS, NUM_BLOCKS = 2000, 257
FIXED = (6, 8, 10, 12, 16, 24, 64)


def overload(
    prompts: tuple[int, int], answers: tuple[int, int], max_num_seqs: int, thrash_limit: float
) -> tuple[float, int]:
    """Returns (tokens generated per step, tokens computed again). Eight requests wait at any time."""
    engine = Engine(
        NUM_BLOCKS,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        max_num_seqs=max_num_seqs,
        thrash_limit=thrash_limit,
    )
    draw, count = np.random.default_rng(1), 0
    for _ in range(NUM_STEPS):
        while engine.scheduler.num_waiting < 8:
            engine.add(f"r{count}", int(draw.integers(*prompts)), int(draw.integers(*answers)))
            count += 1
        engine.step()
    return engine.num_generated / NUM_STEPS, engine.scheduler.num_recomputed_tokens


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [((32, 80), (150, 250)), ((200, 600), (50, 100)), ((8, 16), (400, 600))],
    ids=["long answers", "long prompts", "answers alone"],
)
def test_damping_keeps_four_fifths_of_the_best_fixed_number_of_seats(
    prompts: tuple[int, int], answers: tuple[int, int]
) -> None:
    best = max(overload(prompts, answers, seats, 0)[0] for seats in FIXED)
    _, undamped_recomputed = overload(prompts, answers, 64, 0)
    damped, recomputed = overload(prompts, answers, 64, 0.3)
    print(f"\n{damped:.1f} of {best:.1f} tokens a step, {recomputed} instead of {undamped_recomputed} computed again")
    assert damped >= 0.8 * best
    assert recomputed < undamped_recomputed / 2


def test_seats_sink_to_those_that_run_and_come_back_within_a_window() -> None:
    clock = VirtualClock()
    meter = ThrashMeter(clock, window_s=5.0, limit=0.3, max_num_seqs=64)
    meter.add(recomputed=20, generated=100)
    meter.adapt(40, preempted=True)
    assert meter.seats == 64, "preemptions that cost little change nothing"
    meter.add(recomputed=20, generated=0)
    meter.adapt(40, preempted=False)
    assert meter.seats == 40, "past the limit"
    meter.adapt(38, preempted=False)
    assert meter.seats == 40, "a sequence that has ended may be replaced"
    meter.adapt(37, preempted=True)
    assert meter.seats == 37
    clock.now = 5.0
    meter.adapt(37, preempted=True)
    assert meter.seats == 37
    clock.now = 5.1  # the window has moved on
    meter.adapt(37, preempted=False)
    clock.now = 10.1
    meter.adapt(37, preempted=False)
    assert meter.seats == 64
    assert meter.ratio == 0
