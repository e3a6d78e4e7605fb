"""Histograms: how often a measured value fell into which interval. Engines and router count, Prometheus reads."""

from bisect import bisect_left
from typing import NamedTuple

SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0),
)
"""Upper edges of the intervals for durations."""

TOKENS = tuple(float(2**power) for power in range(16))
"""Upper edges of the intervals for tokens of a step."""


class Distribution(NamedTuple):
    """A histogram at one moment."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    """`counts[i]` values were in (edges[i - 1], edges[i]]; the last count is of values above all edges."""
    total: float
    """The sum of all values."""

    def plus(self, other: "Distribution") -> "Distribution":
        """Both distributions together. Their edges must be the same."""
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Distribution(self.edges, counts, self.total + other.total)


class Histogram:
    """Counts values from the moment when it is made."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._edges, value)] += times
        self._total += value * times

    def add(self, more: Distribution) -> None:
        """Counts the values of a distribution, whose edges must be the same."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, more.counts, strict=True)]
        self._total += more.total

    @property
    def now(self) -> Distribution:
        return Distribution(self._edges, tuple(self._counts), self._total)
