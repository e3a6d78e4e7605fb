"""Plain numbers that the router's parts keep while they work; router/metrics.py exports them."""

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
"""Why a request was not accepted; `cancelled`: its client did not wait for that."""

ENDS: dict[type[RequestError], str] = {
    RequestCancelled: "cancelled",
    DeadlineExceeded: "deadline",
    RequestFailed: "failed",
    Draining: "draining",
}
"""Why an accepted request ended without a finish reason."""

PATHS: tuple[Path, ...] = get_args(Path)


def end_of(told: FinishReason | RequestError) -> str:
    """In one word, how an accepted request ended for its client."""
    return ENDS.get(type(told), "other") if isinstance(told, RequestError) else told


@dataclass(slots=True)
class ReplicaTotals:
    """What one place in a pool has counted in all its lives: it never falls when an engine starts anew."""

    role: PoolName
    transport: str = ""
    """The latest one."""
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
    """What the front doors tell their clients: refusals, ends, and times from the arrival of a call. Durations in
    seconds.

    A request is one answer, as in the router's core: a call that asks for `n` counts `n` times.
    """

    def __init__(self) -> None:
        self.refusals = dict.fromkeys((*REFUSALS.values(), "other"), 0)
        self.ends = dict.fromkeys((*get_args(FinishReason), *ENDS.values(), "other"), 0)
        """By `end_of`, of all accepted requests whose clients were told an end."""
        self.paths = dict.fromkeys(PATHS, 0)
        """Of finished requests."""
        self.first_token = Histogram(SECONDS)
        self.total = Histogram(SECONDS)
        """Of finished requests, as `stages`."""
        self.stages: dict[str, Histogram] = {}

    def refused(self, error: RequestError, num_asked: int) -> None:
        self.refusals[REFUSALS.get(type(error), "other")] += num_asked

    def failed(self, error: RequestError) -> None:
        self.ends[end_of(error)] += 1

    def finished(self, reason: FinishReason, path: Path, total_s: float, stages: dict[str, float]) -> None:
        """`stages` add up to `total_s`."""
        self.ends[end_of(reason)] += 1
        self.paths[path] += 1
        self.total.observe(total_s)
        for stage, seconds in stages.items():
            if stage not in self.stages:
                self.stages[stage] = Histogram(SECONDS)
            self.stages[stage].observe(seconds)
