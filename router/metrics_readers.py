"""Functions that read the numbers of metrics: from the router, from its doors, and from what engines report."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from protocol.histogram import Distribution
from router.metrics_totals import DoorTotals, ReplicaTotals
from router.policy import ReplicaView
from router.router import Router


class Scrape(NamedTuple):
    """What one scrape reads."""

    core: Router
    told: DoorTotals
    """What all doors have told their clients."""
    replicas: list[ReplicaView]
    totals: dict[str, ReplicaTotals]
    """By replica id, summed over all the replica's lives."""


Sample = tuple[tuple[str, ...], float | Distribution]
"""The label values after `model_name`, and the value."""

Reader = Callable[[Scrape], Iterable[Sample]]


def router_counter(key: str) -> Reader:
    """Reads one of the counters that the router's core keeps."""
    return lambda scrape: [((), scrape.core.counters[key])]


def engine_counters(counter: str | Mapping[str, str], *, transport: bool = False) -> Reader:
    """Reads a counter of every engine that keeps it, or several, each by the value of the last label. `transport` adds
    the engine's transport as a label value.
    """
    keys = {(): counter} if isinstance(counter, str) else {(value,): name for value, name in counter.items()}

    def read(scrape: Scrape) -> Iterator[Sample]:
        for replica_id, totals in scrape.totals.items():
            labels = (totals.role, replica_id, *([totals.transport] if transport else []))
            for value, name in keys.items():
                if name in totals.counters:
                    yield labels + value, totals.counters[name]

    return read


def engine_histograms(key: str) -> Reader:
    """Reads the histogram `key` of every engine that keeps it."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for replica_id, totals in scrape.totals.items():
            if key in totals.distributions:
                yield (totals.role, replica_id), totals.distributions[key]

    return read


def engine_gauge(value: Callable[[ReplicaView], float]) -> Reader:
    """Reads a gauge of every engine that is present."""
    return lambda scrape: [((r.hello.role, r.address.replica_id), value(r)) for r in scrape.replicas]


def waiting_requests(scrape: Scrape) -> Iterator[Sample]:
    """Reads how many requests wait in the router and in each engine, by what they wait for."""
    yield ("router", "router", "engines_full"), scrape.core.num_queued
    for replica in scrape.replicas:
        status = replica.status
        if status is None:
            continue
        reasons = {"scheduler": status.num_waiting}
        if replica.hello.role == "prefill":
            reasons |= {"lease": status.num_leases}
        else:
            reasons |= {"transfer": status.num_pulls, "early_handoff": status.num_early_handoffs}
        for reason, number in reasons.items():
            yield (replica.hello.role, replica.address.replica_id, reason), number


def kv_blocks(scrape: Scrape) -> Iterator[Sample]:
    """Reads each engine's KV blocks by state. The states add up to `num_blocks` - 1, because block 0 is never used."""
    for replica in scrape.replicas:
        for state, number in replica.blocks_by_state.items():
            yield (replica.hello.role, replica.address.replica_id, state), number


def replica_states(scrape: Scrape) -> Iterator[Sample]:
    """Reads how many engines of each pool are in each state. Pools that had engines once, and decode, show zeros."""
    past = {totals.role for totals in scrape.totals.values()}
    present = {replica.hello.role for replica in scrape.replicas}
    for pool in sorted(past | present | {"decode"}):
        for state in ("up", "suspected", "draining"):
            yield (pool, state), sum(r.hello.role == pool and r.state == state for r in scrape.replicas)
