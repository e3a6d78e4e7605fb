"""What one engine's steps add up to; its service reports it to the router."""

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from protocol.histogram import SECONDS, TOKENS, Distribution, Histogram


class StepCounts:
    """Adds committed steps to a service's `counters`, cumulative in the life of the engine."""

    KEYS = (
        *("steps", "step_seconds", "scheduler_seconds", "budget_tokens", "scheduled_tokens", "scheduled_sequences"),
        *("drafts", "accepted_drafts", "padding_tokens"),
    )

    def __init__(self, counters: dict[str, float], config: EngineConfig) -> None:
        self._counters = counters
        self._budget = config.max_num_batched_tokens
        self._seconds, self._tokens = Histogram(SECONDS), Histogram(TOKENS)

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
        if batch.num_drafts is not None:
            counters["drafts"] += int(batch.num_drafts.sum())
            counters["accepted_drafts"] += int(output.counts.sum() - batch.sample.sum())

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {"step_seconds": self._seconds.now, "step_tokens": self._tokens.now}
