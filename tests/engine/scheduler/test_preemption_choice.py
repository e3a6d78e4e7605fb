"""Which preemption mode is chosen for a victim, and what the choice learns from executed steps."""

import numpy as np
import pytest

from engine.runner import Batch, StepOutput
from engine.scheduler.preemption import Choice, Costs, Victim, choose_mode

VICTIM = Victim(num_tokens=101, num_computed=100, num_blocks=7, num_running=10)


def costs(prompt_token_s: float | None, copy_block_s: float | None, *, recompute_tried: bool = False) -> Costs:
    made = Costs()
    made.prompt_token_s, made.copy_block_s, made.recompute_tried = prompt_token_s, copy_block_s, recompute_tried
    return made


@pytest.mark.parametrize(
    ("measured", "num_host_free", "has_room", "choice"),
    [
        (costs(None, None), 9, True, Choice("swap", "unmeasured")),
        (costs(None, None), 6, True, Choice("recompute", "unmeasured")),
        (costs(None, 0.001), 9, True, Choice("recompute", "unmeasured")),
        (costs(None, 0.001, recompute_tried=True), 9, True, Choice("swap", "unmeasured")),
        (costs(None, 0.001, recompute_tried=True), 6, True, Choice("recompute", "unmeasured")),
        (costs(0.001, None), 6, False, Choice("recompute", "cheapest")),
        (costs(0.001, 0.001), 9, False, Choice("swap", "cheapest")),  # 0.1 s against 0.014 s, of ten sequences
        (costs(0.001, 0.001), 6, False, Choice("recompute", "cheapest")),
        (costs(0.001, 0.01), 9, False, Choice("recompute", "cheapest")),
        (costs(0.001, 0.01), 9, True, Choice("remote", "cheapest")),  # 0.1 + 0.101 + 0.07 s of one sequence
        (costs(0.001, 0.001), 9, True, Choice("swap", "cheapest")),
        (costs(0.0001, 0.01), 9, True, Choice("recompute", "cheapest")),
    ],
)
def test_auto_takes_what_delays_least(measured: Costs, num_host_free: int, has_room: bool, choice: Choice) -> None:
    assert choose_mode("auto", VICTIM, measured, num_host_free=num_host_free, has_room=has_room) == choice


def test_a_knob_is_obeyed_where_it_can_be() -> None:
    cheap = costs(0.001, 0.001)
    assert choose_mode("recompute", VICTIM, cheap, num_host_free=9, has_room=True) == Choice("recompute", "configured")
    assert choose_mode("swap", VICTIM, cheap, num_host_free=7, has_room=True) == Choice("swap", "configured")
    assert choose_mode("remote", VICTIM, cheap, num_host_free=9, has_room=True) == Choice("remote", "configured")


def step(
    scheduled: list[int], seconds: float, *, swapped: int = 0, swap_seconds: float = 0.0
) -> tuple[Batch, StepOutput]:
    """An executed step with one sequence for each number of tokens in `scheduled`."""
    num_scheduled = np.array(scheduled, np.int32)
    shared = np.zeros((len(scheduled), 1), np.int32)
    batch = Batch(
        step=0,
        rows=np.arange(len(scheduled), dtype=np.int32),
        num_scheduled=num_scheduled,
        num_computed=num_scheduled,
        sample=num_scheduled > 0,
        token_ids=shared,
        block_tables=shared,
        swap_out=np.zeros((swapped, 2), np.int32) if swapped else None,
    )
    output = StepOutput(token_ids=shared, counts=num_scheduled, seconds=seconds, swap_seconds=swap_seconds)
    return batch, output


def test_costs_are_averages_of_what_was_measured() -> None:
    measured = Costs()
    measured.observe(*step([1, 1], 0.0))
    assert (measured.decode_step_s, measured.prompt_token_s, measured.copy_block_s) == (None, None, None)
    measured.observe(*step([1, 1], 0.010))
    measured.observe(*step([1, 1], 0.020))
    assert measured.decode_step_s == pytest.approx(0.012)
    measured.observe(*step([1, 100], 0.112 + 0.5, swapped=10, swap_seconds=0.5))
    assert measured.prompt_token_s == pytest.approx(0.112 * 100 / 101 / 100), "at least its share of the step"
    assert measured.copy_block_s == pytest.approx(0.05)
    measured.observe(*step([], 0.1, swapped=10, swap_seconds=0.1))
    assert measured.copy_block_s == pytest.approx(0.042)
