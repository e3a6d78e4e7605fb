"""Counted values fall into the right intervals, and histograms add up."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.histogram import SECONDS, TOKENS, Histogram


def test_an_edge_belongs_to_the_interval_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.now == ((1.0, 2.0), (2, 2, 1), 7.5)


@given(st.lists(st.integers(0, 200)))
def test_many_at_once_count_like_one_by_one(halves: list[int]) -> None:
    values = [half / 2 for half in halves]
    one_by_one, at_once = Histogram(TOKENS), Histogram(TOKENS)
    for value in values:
        one_by_one.observe(value)
    for value, times in Counter(values).items():
        at_once.observe(value, times)
    assert one_by_one.now == at_once.now
    assert sum(at_once.now.counts) == len(values)


def test_two_lives_add_up() -> None:
    histogram = Histogram(SECONDS)
    histogram.observe(0.25, times=3)
    both = histogram.now.plus(histogram.now)
    assert sum(both.counts) == 6
    assert both.total == 1.5


def test_durations_are_counted_from_a_millisecond_on() -> None:
    assert SECONDS[0] == 0.001
    assert list(SECONDS) == sorted(set(SECONDS))
