"""Plain numbers that the parts of the router keep while they work. router/metrics.py lists them as metrics."""

from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RequestError,
    RequestFailed,
)
from protocol.histogram import SECONDS, Distribution, Histogram
from protocol.messages import FinishReason, PoolName, ReplicaStatus
from router.request import Path

REFUSALS: dict[type[RequestError], str] = {
    InvalidRequest: "invalid",
    Overloaded: "queue_full",
    Draining: "draining",
    DeadlineExceeded: "deadline",
    RequestFailed: "no_engine",
    RequestCancelled: "cancelled",
}
"""Why a request was not accepted. `cancelled`: its client left before it could be."""

ENDS: dict[type[RequestError], str] = {
    RequestCancelled: "cancelled",
    DeadlineExceeded: "deadline",
    RequestFailed: "failed",
    Draining: "draining",
}
"""Why an accepted request ended without a finish reason."""

PATHS: tuple[Path, ...] = get_args(Path)


def end_of(told: FinishReason | RequestError) -> str:
    """Returns one word for how an accepted request ended for its client."""
    return ENDS.get(type(told), "other") if isinstance(told, RequestError) else told


@dataclass(slots=True)
class ReplicaTotals:
    """What one replica has counted in all its lives. Totals never fall when its engine starts anew."""

    role: PoolName
    transport: str = ""
    """The transport that its latest status names."""
    counters: dict[str, float] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)

    def add(self, status: ReplicaStatus) -> None:
        """Adds the last status of one life."""
        self.transport = status.transport
        for name, value in status.counters.items():
            self.counters[name] = self.counters.get(name, 0.0) + value
        for name, distribution in status.distributions.items():
            before = self.distributions.get(name)
            self.distributions[name] = distribution if before is None else before.plus(distribution)

    def copy(self) -> "ReplicaTotals":
        return ReplicaTotals(self.role, self.transport, dict(self.counters), dict(self.distributions))


class DoorCounts(NamedTuple):
    """What a door has counted in some time. The fields are those of `DoorTotals`; words with 0 are left out."""

    refusals: dict[str, int]
    ends: dict[str, int]
    paths: dict[str, int]
    first_token: Distribution
    total: Distribution
    stages: dict[str, Distribution]


class DoorTotals:
    """What front doors told their clients: refusals, ends, and times from the arrival of a call in seconds.

    A request is one answer, as in the router's core: a call that asks for `n` answers counts `n` times.
    """

    def __init__(self) -> None:
        self.refusals = dict.fromkeys((*REFUSALS.values(), "other"), 0)
        self.ends = dict.fromkeys((*get_args(FinishReason), *ENDS.values(), "other"), 0)
        """How accepted requests ended for their clients, by the words of `end_of`."""
        self.paths: dict[str, int] = dict.fromkeys(PATHS, 0)
        """Where finished requests ran."""
        self.first_token = Histogram(SECONDS)
        self.total = Histogram(SECONDS)
        """Seconds that finished requests took; `stages` has the parts."""
        self.stages: dict[str, Histogram] = {}

    def counts(self) -> DoorCounts | None:
        """Returns what was counted, or None if nothing was."""
        refusals, ends, paths = map(_above_zero, (self.refusals, self.ends, self.paths))
        first_token = self.first_token.now
        if not (refusals or ends or any(first_token.counts)):
            return None
        stages = {stage: histogram.now for stage, histogram in self.stages.items()}
        return DoorCounts(refusals, ends, paths, first_token, self.total.now, stages)

    def add(self, counts: DoorCounts) -> None:
        """Adds what another one has counted."""
        for mine, theirs in ((self.refusals, counts.refusals), (self.ends, counts.ends), (self.paths, counts.paths)):
            for word, count in theirs.items():
                mine[word] += count
        self.first_token.add(counts.first_token)
        self.total.add(counts.total)
        for stage, seconds in counts.stages.items():
            self.stages.setdefault(stage, Histogram(SECONDS)).add(seconds)

    def refused(self, error: RequestError, num_asked: int) -> None:
        self.refusals[REFUSALS.get(type(error), "other")] += num_asked

    def failed(self, error: RequestError) -> None:
        self.ends[end_of(error)] += 1

    def finished(self, reason: FinishReason, path: Path, total_s: float, stages: dict[str, float]) -> None:
        """Counts a request that ended with a finish reason. The `stages` add up to `total_s`."""
        self.ends[end_of(reason)] += 1
        self.paths[path] += 1
        self.total.observe(total_s)
        for stage, seconds in stages.items():
            if stage not in self.stages:
                self.stages[stage] = Histogram(SECONDS)
            self.stages[stage].observe(seconds)


def _above_zero(counts: dict[str, int]) -> dict[str, int]:
    return {word: count for word, count in counts.items() if count}
