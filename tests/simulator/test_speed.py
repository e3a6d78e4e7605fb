"""The speed is measured on right answers: both runners say what the model says, and steps are counted."""

import pytest

from simulator import speed
from simulator.speed import measure


def test_both_runners_give_the_answers_and_count_the_same_steps() -> None:
    cheap = measure(checked=False, num_running=5, num_decode=2)  # raises if a token is wrong
    checked = measure(checked=True, num_running=5, num_decode=2)
    assert cheap.num_steps == checked.num_steps > 1000
    assert cheap.steps_per_s > 0


def test_the_report_says_which_figure_is_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "steps_per_s", lambda checked: 2000.0 if checked else 12000.0)
    monkeypatch.setattr(speed, "steps_per_s_of_all", lambda num_processes, *, checked: 4000.0 if checked else 24000.0)
    lines = speed.report().splitlines()
    assert lines[1].split() == ["invariants", "off", "on"]
    assert lines[2].split() == ["one", "process", "12,000", "2,000"]
    assert lines[3].split()[-2:] == ["24,000", "4,000"]
