"""The load of `bench.interference` fits the machine."""

import pytest

from bench.interference import Load


@pytest.mark.parametrize(
    ("lone_s", "arrival_s", "duration_s"),
    [(0.5, 3.0, 18.0), (4.0, 5.0, 30.0), (12.0, 15.0, 45.0)],
    ids=["quick", "slower than its prompts came", "no longer than allowed"],
)
def test_long_prompts_arrive_no_faster_than_one_engine_computes_them(
    lone_s: float, arrival_s: float, duration_s: float
) -> None:
    assert Load.fitting(lone_s) == Load(arrival_s, duration_s)
