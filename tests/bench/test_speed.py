"""The speed figure is of right answers: both runners say what the model says, and steps are counted."""

from bench.speed import measure


def test_both_runners_give_the_answers_and_count_the_same_steps() -> None:
    cheap = measure(checked=False, num_running=5, num_decode=2)  # raises if a token is wrong
    checked = measure(checked=True, num_running=5, num_decode=2)
    assert cheap.num_steps == checked.num_steps > 1000
    assert cheap.steps_per_s > 0
