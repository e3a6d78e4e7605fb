"""Plain numbers that the parts of the router keep while they work. router/metrics.py lists them as metrics."""

from dataclasses import dataclass, field
from typing import get_args

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


class DoorTotals:
    """What the front door told its clients: refusals, ends, and times from the arrival of a call in seconds.

    A request is one answer, as in the router's core: a call that asks for `n` answers counts `n` times.
    """

    def __init__(self) -> None:
        self.refusals = dict.fromkeys((*REFUSALS.values(), "other"), 0)
        self.ends = dict.fromkeys((*get_args(FinishReason), *ENDS.values(), "other"), 0)
        """How accepted requests ended for their clients, by the words of `end_of`."""
        self.paths = dict.fromkeys(PATHS, 0)
        """Where finished requests ran."""
        self.first_token = Histogram(SECONDS)
        self.total = Histogram(SECONDS)
        """Seconds that finished requests took; `stages` has the parts."""
        self.stages: dict[str, Histogram] = {}

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
