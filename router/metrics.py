"""The metrics that a deployment shows to Prometheus: name, kind, help and labels of each, and what reads its numbers.

    python -m router.metrics        prints the table

Every name begins with `twopass_`, counters end with `_total`, and every series has the label `model_name`. Units are
seconds, bytes, tokens and requests. A request is one answer: a call that asks for `n` answers is `n` requests, which
are accepted together or not at all. A call that is refused before it was read is one request. An engine's numbers are
those of its last status, so they are up to `status_interval_s` old. Its counters outlive it, its gauges do not.

The file is long because all metrics stand in one table: whoever looks for a name finds it here.
"""

from typing import Literal, NamedTuple

from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from router.metrics_readers import (
    Reader,
    engine_counters,
    engine_gauge,
    engine_histograms,
    kv_blocks,
    replica_states,
    router_counter,
    waiting_requests,
)

PREFIX = "twopass_"
ENGINE = ("pool", "replica")
"""The labels that name one engine."""


class Metric(NamedTuple):
    """A row of the table. `name` has neither prefix nor `_total`; `labels` come after `model_name`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Reader


METRICS = (
    # Requests as the router sees them.
    Metric(
        "requests_accepted",
        "counter",
        "Answers asked for and taken in; a call with n asks for n.",
        (),
        router_counter("accepted"),
    ),
    Metric(
        "requests_rejected",
        "counter",
        "Answers asked for and not taken in; a call with n asks for n, one that could not be read for one.",
        ("reason",),
        lambda scrape: [((reason,), count) for reason, count in scrape.told.refusals.items()],
    ),
    Metric(
        "requests_ended",
        "counter",
        "Accepted answers that have ended, by the finish reason or the error that their client was told.",
        ("reason",),
        lambda scrape: [((reason,), count) for reason, count in scrape.told.ends.items()],
    ),
    Metric(
        "requests_by_path",
        "counter",
        "Answers that ended with a finish reason, by where the last attempt really ran.",
        ("path",),
        lambda scrape: [((path,), count) for path, count in scrape.told.paths.items()],
    ),
    Metric(
        "request_retries", "counter", "Attempts started because the one before failed.", (), router_counter("retries")
    ),
    Metric("requests_returned", "counter", "Attempts that an engine gave back.", (), router_counter("returned")),
    Metric(
        "accepted_prompt_tokens",
        "counter",
        "Prompt tokens of accepted answers; a prompt counts once per answer.",
        (),
        router_counter("prompt_tokens"),
    ),
    Metric(
        "delivered_tokens",
        "counter",
        "Answer tokens handed on to front doors, each once.",
        (),
        router_counter("delivered_tokens"),
    ),
    Metric(
        "repeated_tokens",
        "counter",
        "Answer tokens that came from an engine a second time.",
        (),
        router_counter("repeated_tokens"),
    ),
    Metric(
        "ignored_messages",
        "counter",
        "Messages and rows of attempts or epochs that no longer count.",
        (),
        router_counter("ignored"),
    ),
    Metric(
        "requests_waiting", "gauge", "Requests that wait, by what they wait for.", (*ENGINE, "reason"), waiting_requests
    ),
    Metric(
        "queue_oldest_seconds",
        "gauge",
        "How long the oldest request in the router's queue has waited.",
        (),
        lambda scrape: [((), scrape.core.oldest_queued_s)],
    ),
    Metric(
        "requests_in_flight",
        "gauge",
        "Attempts dispatched to an engine that are not over.",
        ENGINE,
        engine_gauge(lambda r: r.in_flight),
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "Time from the arrival of a call to an answer's first token.",
        (),
        lambda scrape: [((), scrape.told.first_token.now)],
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Time between two tokens of an answer as they reach the router; tokens of one step are 0 apart.",
        (),
        lambda scrape: [((), scrape.core.inter_token.now)],
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "Time from the arrival of a call to the end of an answer, for answers that ended with a finish reason.",
        (),
        lambda scrape: [((), scrape.told.total.now)],
    ),
    Metric(
        "request_stage_seconds",
        "histogram",
        "The parts of e2e_request_latency_seconds, which add up to it.",
        ("stage",),
        lambda scrape: [((stage,), histogram.now) for stage, histogram in scrape.told.stages.items()],
    ),
    # Engines.
    Metric(
        "replicas",
        "gauge",
        "Engines that have said hello to the router and are not down.",
        ("pool", "state"),
        replica_states,
    ),
    Metric(
        "replica_epoch",
        "gauge",
        "The replica's epoch, which grows each time its engine starts anew.",
        ENGINE,
        engine_gauge(lambda r: r.address.epoch),
    ),
    Metric(
        "requests_running",
        "gauge",
        "Sequences in the running batch.",
        ENGINE,
        engine_gauge(lambda r: r.status.num_running if r.status else 0),
    ),
    Metric(
        "kv_blocks",
        "gauge",
        "KV blocks: used (owned or leased), held (a step in flight may touch them), cached (free, content can be "
        "hit), blank (free).",
        (*ENGINE, "state"),
        kv_blocks,
    ),
    Metric(
        "preemptions",
        "counter",
        "Running sequences that lost their KV blocks, by how they get their KV back.",
        (*ENGINE, "mode"),
        engine_counters(MODE_COUNTERS),
    ),
    Metric(
        "preemption_reasons",
        "counter",
        "Preemptions by why their mode was chosen: the knob (configured), a cost (cheapest, unmeasured), or a lack "
        "(host_full, no_room).",
        (*ENGINE, "reason"),
        engine_counters(REASON_COUNTERS),
    ),
    Metric(
        "swapped_bytes",
        "counter",
        "KV bytes copied to host memory or back; each way counts.",
        ENGINE,
        engine_counters("swapped_bytes"),
    ),
    Metric(
        "swap_seconds",
        "counter",
        "Time that copies of KV to host memory and back took.",
        ENGINE,
        engine_counters("swap_seconds"),
    ),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens computed again after a preemption.",
        ENGINE,
        engine_counters("recomputed_tokens"),
    ),
    Metric(
        "thrash_ratio",
        "gauge",
        "Recomputed tokens per generated one over the engine's thrash_window_s; past thrash_limit fewer sequences run.",
        ENGINE,
        engine_gauge(lambda r: r.status.thrash_ratio if r.status else 0.0),
    ),
    Metric(
        "generated_tokens",
        "counter",
        "Answer tokens that the engine sampled.",
        ENGINE,
        engine_counters("generated_tokens"),
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens whose KV the engine computed, found in its prefix cache, or pulled from a prefill engine.",
        (*ENGINE, "source"),
        engine_counters(
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
        engine_counters("prefix_query_tokens"),
    ),
    Metric(
        "prefix_hit_tokens",
        "counter",
        "Prompt tokens that first attempts found in the prefix cache.",
        ENGINE,
        engine_counters("cached_tokens"),
    ),
    Metric(
        "redispatched_query_tokens",
        "counter",
        "Prompt and answer tokens that later attempts looked up in the prefix cache: mostly the request's own work.",
        ENGINE,
        engine_counters("redispatched_query_tokens"),
    ),
    Metric(
        "redispatched_hit_tokens",
        "counter",
        "Prompt and answer tokens that later attempts found in the prefix cache.",
        ENGINE,
        engine_counters("redispatched_cached_tokens"),
    ),
    Metric("step_seconds", "histogram", "Execution time of one step.", ENGINE, engine_histograms("step_seconds")),
    Metric("step_tokens", "histogram", "Tokens scheduled in one step.", ENGINE, engine_histograms("step_tokens")),
    Metric(
        "step_sequences",
        "counter",
        "Sequences scheduled, summed over all steps.",
        ENGINE,
        engine_counters("scheduled_sequences"),
    ),
    Metric(
        "step_budget_tokens",
        "counter",
        "Token budget, summed over all steps.",
        ENGINE,
        engine_counters("budget_tokens"),
    ),
    Metric(
        "scheduler_seconds",
        "counter",
        "Time spent on building batches and applying their results.",
        ENGINE,
        engine_counters("scheduler_seconds"),
    ),
    Metric("draft_tokens", "counter", "Draft tokens computed.", ENGINE, engine_counters("drafts")),
    Metric(
        "accepted_draft_tokens",
        "counter",
        "Draft tokens that the model confirmed.",
        ENGINE,
        engine_counters("accepted_drafts"),
    ),
    Metric(
        "padding_tokens",
        "counter",
        "Tokens computed to fill a step up to a graph's size.",
        ENGINE,
        engine_counters("padding_tokens"),
    ),
    Metric(
        "kernel_compilations",
        "counter",
        "Variants of GPU kernels that were compiled after the engine had started, while requests waited; 0 is right.",
        ENGINE,
        engine_counters("kernel_compilations"),
    ),
    # KV transfer.
    Metric("transfers", "counter", "Pulls started.", (*ENGINE, "transport"), engine_counters("pulls", transport=True)),
    Metric(
        "transfer_bytes",
        "counter",
        "KV bytes pulled and verified.",
        (*ENGINE, "transport"),
        engine_counters("pulled_bytes", transport=True),
    ),
    Metric(
        "transfer_seconds",
        "counter",
        "Time that successful pulls took.",
        (*ENGINE, "transport"),
        engine_counters("pull_seconds", transport=True),
    ),
    Metric(
        "transfer_failures",
        "counter",
        "Pulls that failed, and peers that could not be opened.",
        (*ENGINE, "transport"),
        engine_counters("pull_failures", transport=True),
    ),
    Metric(
        "transfer_expiries",
        "counter",
        "Pulls whose lease ended before they did.",
        (*ENGINE, "transport"),
        engine_counters("leases_lost", transport=True),
    ),
    Metric(
        "transfer_checksum_failures",
        "counter",
        "Pulls that brought other bytes than were offered; only counted if transfer.checksum is set.",
        (*ENGINE, "transport"),
        engine_counters("checksum_failures", transport=True),
    ),
    Metric(
        "leases_ended",
        "counter",
        "Leases on a prefill engine's blocks, by the answer that ended them; expired means none came in time.",
        (*ENGINE, "outcome"),
        engine_counters({"consumed": "consumed", "refused": "refused", "expired": "expired"}),
    ),
)


def main() -> None:
    print("| metric | kind | labels besides `model_name` | meaning |\n|---|---|---|---|")
    for metric in METRICS:
        suffix = "_total" if metric.kind == "counter" else ""
        print(f"| `{PREFIX}{metric.name}{suffix}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |")


if __name__ == "__main__":
    main()
