"""What the deployment shows to Prometheus. One row of `METRICS` per metric: name, kind, help, labels, and where its
numbers come from.

    python -m router.metrics        prints the table

Every name begins with `twopass_`, counters end with `_total`, every series has the label `model_name`. Units are
seconds, bytes, tokens, requests. A request is one answer: a call that asks for `n` is `n` requests, taken in all or
none; one refused before it was read is one. An engine's numbers are those of its last status, so up to
`status_interval_s` old. Its counters outlive it; its gauges do not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.histogram import Distribution
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from router.frontdoor import FrontDoor
from router.metrics_totals import ReplicaTotals
from router.policy import ReplicaView
from router.router import Router

PREFIX = "twopass_"
ENGINE = ("pool", "replica")

Sample = tuple[tuple[str, ...], float | Distribution]
"""Label values after `model_name`, and the value."""


class Now(NamedTuple):
    """What one scrape reads."""

    core: Router
    door: FrontDoor
    replicas: list[ReplicaView]
    totals: dict[str, ReplicaTotals]
    """By replica id, over all its lives."""


Reader = Callable[[Now], Iterable[Sample]]


class Metric(NamedTuple):
    name: str
    """Without prefix and `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Reader


# ---- where numbers come from


def _router(key: str) -> Reader:
    """A counter of the router's core."""
    return lambda now: [((), now.core.counters[key])]


def _engines(counter: str | Mapping[str, str], *, transport: bool = False) -> Reader:
    """A counter of every engine that keeps it; or several, each by the value of the last label."""
    keys = {(): counter} if isinstance(counter, str) else {(value,): name for value, name in counter.items()}

    def read(now: Now) -> Iterator[Sample]:
        for replica_id, totals in now.totals.items():
            labels = (totals.role, replica_id, *([totals.transport] if transport else []))
            yield from (
                (labels + value, totals.counters[name]) for value, name in keys.items() if name in totals.counters
            )

    return read


def _distributions(key: str) -> Reader:
    def read(now: Now) -> Iterator[Sample]:
        for replica_id, totals in now.totals.items():
            if key in totals.distributions:
                yield (totals.role, replica_id), totals.distributions[key]

    return read


def _replicas(value: Callable[[ReplicaView], float]) -> Reader:
    """A gauge of every engine that is there."""
    return lambda now: [((r.hello.role, r.address.replica_id), value(r)) for r in now.replicas]


def _waiting(now: Now) -> Iterator[Sample]:
    yield ("router", "router", "engines_full"), now.core.num_queued
    for replica in now.replicas:
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


def _blocks(now: Now) -> Iterator[Sample]:
    for replica in now.replicas:
        status = replica.status
        if status is None:
            continue
        states = {
            "used": replica.hello.num_blocks - 1 - status.num_free_blocks - status.num_held_blocks,
            "held": status.num_held_blocks,
            "cached": status.num_cached_blocks,
            "blank": status.num_free_blocks - status.num_cached_blocks,
        }
        for state, number in states.items():
            yield (replica.hello.role, replica.address.replica_id, state), number


def _states(now: Now) -> Iterator[Sample]:
    pools = (
        {totals.role for totals in now.totals.values()} | {replica.hello.role for replica in now.replicas} | {"decode"}
    )
    for pool in sorted(pools):
        for state in ("up", "suspected", "draining"):
            yield (pool, state), sum(r.hello.role == pool and r.state == state for r in now.replicas)


# ---- the table

METRICS = (
    # requests, as the router sees them
    Metric(
        "requests_accepted",
        "counter",
        "Answers asked for and taken in; a call with n asks for n.",
        (),
        _router("accepted"),
    ),
    Metric(
        "requests_rejected",
        "counter",
        "Answers asked for and not taken in; a call with n asks for n, one that could not be read for one.",
        ("reason",),
        lambda now: [((reason,), count) for reason, count in now.door.totals.refusals.items()],
    ),
    Metric(
        "requests_ended",
        "counter",
        "Accepted answers that have ended, by the finish reason or the error that their client was told.",
        ("reason",),
        lambda now: [((reason,), count) for reason, count in now.door.totals.ends.items()],
    ),
    Metric(
        "requests_by_path",
        "counter",
        "Answers that ended with a finish reason, by where the last attempt really ran.",
        ("path",),
        lambda now: [((path,), count) for path, count in now.door.totals.paths.items()],
    ),
    Metric("request_retries", "counter", "Attempts started because the one before failed.", (), _router("retries")),
    Metric("requests_returned", "counter", "Attempts that an engine gave back.", (), _router("returned")),
    Metric(
        "accepted_prompt_tokens",
        "counter",
        "Prompt tokens of accepted answers, of each answer anew.",
        (),
        _router("prompt_tokens"),
    ),
    Metric(
        "delivered_tokens",
        "counter",
        "Answer tokens handed on to front doors, each once.",
        (),
        _router("delivered_tokens"),
    ),
    Metric(
        "repeated_tokens",
        "counter",
        "Answer tokens that came from an engine a second time.",
        (),
        _router("repeated_tokens"),
    ),
    Metric(
        "ignored_messages",
        "counter",
        "Messages and rows of attempts or epochs that no longer count.",
        (),
        _router("ignored"),
    ),
    Metric("requests_waiting", "gauge", "Requests that wait, by what they wait for.", (*ENGINE, "reason"), _waiting),
    Metric(
        "queue_oldest_seconds",
        "gauge",
        "How long the oldest request in the router's queue has waited there.",
        (),
        lambda now: [((), now.core.oldest_queued_s)],
    ),
    Metric(
        "requests_in_flight",
        "gauge",
        "Attempts dispatched to an engine that are not over.",
        ENGINE,
        _replicas(lambda r: r.in_flight),
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a call to an answer's first token.",
        (),
        lambda now: [((), now.door.totals.first_token.now)],
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Between two tokens of an answer, as they reach the router; tokens of one step are 0 apart.",
        (),
        lambda now: [((), now.core.inter_token.now)],
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "From the arrival of a call to the end of an answer; those that ended with a finish reason.",
        (),
        lambda now: [((), now.door.totals.total.now)],
    ),
    Metric(
        "request_stage_seconds",
        "histogram",
        "Parts of e2e_request_latency_seconds; they add up to it.",
        ("stage",),
        lambda now: [((stage,), histogram.now) for stage, histogram in now.door.totals.stages.items()],
    ),
    # engines
    Metric("replicas", "gauge", "Engines that have greeted the router.", ("pool", "state"), _states),
    Metric("replica_epoch", "gauge", "Which life of a replica it is.", ENGINE, _replicas(lambda r: r.address.epoch)),
    Metric(
        "requests_running",
        "gauge",
        "Sequences in the batch.",
        ENGINE,
        _replicas(lambda r: r.status.num_running if r.status else 0),
    ),
    Metric(
        "kv_blocks",
        "gauge",
        "KV blocks: used (owned or leased), held (a step in flight may touch them), cached (free, content can be "
        "hit), blank (free).",
        (*ENGINE, "state"),
        _blocks,
    ),
    Metric(
        "preemptions",
        "counter",
        "Running sequences that lost their KV blocks, by how they get their KV back.",
        (*ENGINE, "mode"),
        _engines(MODE_COUNTERS),
    ),
    Metric(
        "preemption_reasons",
        "counter",
        "Preemptions by why their mode was chosen: the knob (configured), a cost (cheapest, unmeasured), or a lack "
        "(host_full, no_room).",
        (*ENGINE, "reason"),
        _engines(REASON_COUNTERS),
    ),
    Metric(
        "swapped_bytes",
        "counter",
        "KV copied to host memory and back, each way counted.",
        ENGINE,
        _engines("swapped_bytes"),
    ),
    Metric("swap_seconds", "counter", "Duration of these copies.", ENGINE, _engines("swap_seconds")),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens computed again after a preemption.",
        ENGINE,
        _engines("recomputed_tokens"),
    ),
    Metric(
        "thrash_ratio",
        "gauge",
        "Recomputed tokens per generated one over the engine's thrash_window_s; past thrash_limit it admits nobody.",
        ENGINE,
        _replicas(lambda r: r.status.thrash_ratio if r.status else 0.0),
    ),
    Metric("generated_tokens", "counter", "Answer tokens sampled here.", ENGINE, _engines("generated_tokens")),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens whose KV was computed here, found in the prefix cache, or pulled from a prefill engine.",
        (*ENGINE, "source"),
        _engines(
            {
                "computed": "prompt_tokens",
                "cached": "cached_tokens",
                "redispatched_cached": "redispatched_cached_tokens",
                "transferred": "transferred_tokens",
            }
        ),
    ),
    Metric(
        "prefix_query_tokens",
        "counter",
        "Prompt tokens that first attempts looked up in the prefix cache.",
        ENGINE,
        _engines("prefix_query_tokens"),
    ),
    Metric("prefix_hit_tokens", "counter", "Of these, found.", ENGINE, _engines("cached_tokens")),
    Metric(
        "redispatched_query_tokens",
        "counter",
        "Prompt and answer tokens that later attempts looked up there: mostly the request's own work.",
        ENGINE,
        _engines("redispatched_query_tokens"),
    ),
    Metric("redispatched_hit_tokens", "counter", "Of these, found.", ENGINE, _engines("redispatched_cached_tokens")),
    Metric("step_seconds", "histogram", "Execution of one step.", ENGINE, _distributions("step_seconds")),
    Metric("step_tokens", "histogram", "Tokens scheduled in one step.", ENGINE, _distributions("step_tokens")),
    Metric(
        "step_sequences", "counter", "Sequences scheduled, over all steps.", ENGINE, _engines("scheduled_sequences")
    ),
    Metric("step_budget_tokens", "counter", "Token budget, over all steps.", ENGINE, _engines("budget_tokens")),
    Metric(
        "scheduler_seconds",
        "counter",
        "Building batches and applying their results.",
        ENGINE,
        _engines("scheduler_seconds"),
    ),
    Metric("draft_tokens", "counter", "Draft tokens computed.", ENGINE, _engines("drafts")),
    Metric(
        "accepted_draft_tokens",
        "counter",
        "Draft tokens that the model confirmed.",
        ENGINE,
        _engines("accepted_drafts"),
    ),
    Metric(
        "padding_tokens",
        "counter",
        "Tokens computed to fill a step up to a graph's size.",
        ENGINE,
        _engines("padding_tokens"),
    ),
    # KV transfer
    Metric("transfers", "counter", "Pulls started.", (*ENGINE, "transport"), _engines("pulls", transport=True)),
    Metric(
        "transfer_bytes",
        "counter",
        "KV bytes pulled and verified.",
        (*ENGINE, "transport"),
        _engines("pulled_bytes", transport=True),
    ),
    Metric(
        "transfer_seconds",
        "counter",
        "Duration of these pulls.",
        (*ENGINE, "transport"),
        _engines("pull_seconds", transport=True),
    ),
    Metric(
        "transfer_failures",
        "counter",
        "Pulls that failed, and peers that could not be opened.",
        (*ENGINE, "transport"),
        _engines("pull_failures", transport=True),
    ),
    Metric(
        "transfer_expiries",
        "counter",
        "Pulls whose lease ended before they did.",
        (*ENGINE, "transport"),
        _engines("leases_lost", transport=True),
    ),
    Metric(
        "transfer_checksum_failures",
        "counter",
        "Pulls that brought other bytes than were offered; counted where transfer.checksum is set.",
        (*ENGINE, "transport"),
        _engines("checksum_failures", transport=True),
    ),
    Metric(
        "leases_ended",
        "counter",
        "Leases on a prefill engine's blocks, by the answer they got; expired: none in time.",
        (*ENGINE, "outcome"),
        _engines({outcome: outcome for outcome in ("consumed", "refused", "expired")}),
    ),
)


# ---- the export


class RouterCollector(Collector):
    """Not thread-safe: `collect` reads the state of the event loop, so it must run there."""

    def __init__(self, core: Router, door: FrontDoor) -> None:
        self._core, self._door = core, door

    def collect(self) -> list[Family]:
        now = Now(self._core, self._door, list(self._core.replicas()), self._core.totals())
        return [_family(metric, metric.read(now), self._door.model.name) for metric in METRICS]


def _family(metric: Metric, samples: Iterable[Sample], model_name: str) -> Family:
    name, labels = PREFIX + metric.name, ("model_name", *metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for values, value in samples:
            assert isinstance(value, Distribution)
            histogram.add_metric((model_name, *values), _buckets(value), value.total)
        return histogram
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(name, metric.help, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Distribution)
        family.add_metric((model_name, *values), value)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """(upper edge, values up to it), cumulative, as Prometheus wants them."""
    buckets, so_far = [], 0
    for edge, count in zip((*map(repr, distribution.edges), "+Inf"), distribution.counts, strict=True):
        so_far += count
        buckets.append((edge, float(so_far)))
    return buckets


def main() -> None:
    print("| metric | kind | labels besides `model_name` | meaning |\n|---|---|---|---|")
    for metric in METRICS:
        suffix = "_total" if metric.kind == "counter" else ""
        print(f"| `{PREFIX}{metric.name}{suffix}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |")


if __name__ == "__main__":
    main()
