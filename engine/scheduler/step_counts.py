"""Sums over one engine's steps, which its service reports to the router."""

import logging
from collections import deque

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler.scheduler import Scheduler
from protocol.histogram import SECONDS, TOKENS, Histogram
from protocol.messages import ReplicaStatus, RequestKey

log = logging.getLogger(__name__)

NUM_STEPS = 8
"""How many of the newest steps a status shows."""
PREFIX_COUNTERS = ("cached_tokens", "prefix_query_tokens", "redispatched_cached_tokens", "redispatched_query_tokens")
"""The first attempt of a request finds in the prefix cache what others left. Later attempts mostly find the request's
own work, so they are counted apart.
"""


class StepCounts:
    """Adds committed steps and prefix lookups to a service's `counters`, which are cumulative in an engine's life."""

    KEYS = (
        *("steps", "step_seconds", "scheduler_seconds", "budget_tokens", "scheduled_tokens", "scheduled_sequences"),
        *("drafts", "accepted_drafts", "padding_tokens", "kernel_compilations"),
    )

    def __init__(self, counters: dict[str, float], config: EngineConfig) -> None:
        self._counters = counters
        self._budget = config.max_num_batched_tokens
        self._looks_up = config.enable_prefix_caching
        self._seconds, self._tokens = Histogram(SECONDS), Histogram(TOKENS)
        self._batches: deque[Batch] = deque(maxlen=NUM_STEPS)

    def looked_up(self, key: RequestKey, num_cached: int, num_tokens: int) -> None:
        """Counts an attempt that began with `num_tokens` known tokens, of which the prefix cache had `num_cached`."""
        kind = "" if key.attempt == 1 else "redispatched_"
        self._counters[f"{kind}cached_tokens"] += num_cached
        if self._looks_up:
            self._counters["redispatched_query_tokens" if kind else "prefix_query_tokens"] += num_tokens

    def scheduled(self, batch: Batch) -> None:
        """Keeps the batch, since the status shows the newest steps."""
        self._batches.append(batch)

    def committed(self, batch: Batch, output: StepOutput) -> None:
        num_tokens = batch.num_tokens
        self._seconds.observe(output.seconds)
        self._tokens.observe(num_tokens)
        counters = self._counters
        counters["steps"] += 1
        counters["step_seconds"] += output.seconds
        counters["budget_tokens"] += self._budget
        counters["scheduled_tokens"] += num_tokens
        counters["scheduled_sequences"] += len(batch.rows)
        if output.compiled:
            counters["kernel_compilations"] += len(output.compiled)
            log.warning("a step waited for kernels to be compiled", extra={"kernels": output.compiled})
        if batch.num_drafts is not None:
            counters["drafts"] += int(batch.num_drafts.sum())
            counters["accepted_drafts"] += int(output.counts.sum() - batch.sample.sum())

    def status(
        self,
        scheduler: Scheduler,
        seq: int,
        *,
        draining: bool,
        num_leases: int = 0,
        num_pulls: int = 0,
        num_early_handoffs: int = 0,
        transport: str = "",
    ) -> ReplicaStatus:
        """The engine's status; the keywords are what only its pool knows. It takes the changes of the prefix cache, so
        it must be called once per message.
        """
        added, removed = scheduler.blocks.take_hash_changes()
        return ReplicaStatus(
            state="draining" if draining else "up",
            seq=seq,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_leases=num_leases,
            num_pulls=num_pulls,
            num_early_handoffs=num_early_handoffs,
            num_free_blocks=scheduler.num_free_blocks,
            num_cached_blocks=scheduler.blocks.num_cached,
            num_held_blocks=scheduler.blocks.num_held,
            thrash_ratio=scheduler.thrash_ratio,
            transport=transport,
            counters=dict(self._counters),
            distributions={"step_seconds": self._seconds.now, "step_tokens": self._tokens.now},
            num_scheduled_tokens=tuple(batch.num_scheduled_tokens() for batch in self._batches),
            hashes_added=added,
            hashes_removed=removed,
        )
