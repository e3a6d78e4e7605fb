"""A scheduler with the arithmetic model on a virtual clock, and counts of what they did."""

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.arrays import Int32
from protocol.clock import VirtualClock
from protocol.messages import RequestKey, SamplingParams

STEP_S = 0.02


class Engine:
    """Executes steps that take `STEP_S` each. Blocks have 16 tokens."""

    def __init__(self, num_blocks: int = 4096, *, proposer: Any = None, num_host_blocks: int = 0, **knobs: Any) -> None:
        defaults = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 40_000, "block_size": 16}
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            EngineConfig(num_host_blocks=num_host_blocks, **(defaults | {"thrash_limit": 0} | knobs)),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            proposer=proposer,
            clock=self.clock,
        )
        self.runner = ArithmeticRunner(np.zeros((num_blocks, 16), np.int64), num_host_blocks=num_host_blocks)
        self.num_steps = self.num_preempted = self.num_generated = self.num_scheduled = self.most_running = 0
        self.started_at: dict[str, int] = {}
        """The step in which each request was first in a batch."""
        self.num_cached: dict[str, int] = {}
        """How many cached tokens each request found when it was first in a batch."""
        self.ended: list[str] = []
        self._count = 0

    def add(
        self, name: str, num_prompt: int, max_tokens: int = 1, *, prompt: Int32 | None = None, priority: int = 0
    ) -> None:
        """Adds a request. Unless a prompt is given, it differs from all others from its first token on."""
        self._count += 1
        if prompt is None:
            prompt = np.arange(num_prompt, dtype=np.int32) + self._count
        sampling = SamplingParams()
        key, arrival = RequestKey(1, name, 1), self.num_steps * STEP_S
        request = Request(
            key=key,
            request_number=self._count,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            priority=priority,
            arrival=arrival,
        )
        self.scheduler.add(request)

    def add_many(self, count: int, num_prompt: int, max_tokens: int) -> None:
        for index in range(count):
            self.add(f"r{index}", num_prompt, max_tokens)

    def step(self) -> dict[str, int]:
        """Executes a step. Returns its tokens by request, nothing if there is nothing to do."""
        batch = self.scheduler.schedule()
        events = self.scheduler.take_events()
        self.num_preempted += len(events.preempted)
        for key, cached in events.admitted:
            self.started_at[key.request_id], self.num_cached[key.request_id] = self.num_steps, cached
        self.most_running = max(self.most_running, self.scheduler.num_running)
        if batch is None:
            return {}
        self.clock.now += STEP_S
        committed = self.scheduler.commit(self.runner.execute(batch))
        self.num_steps += 1
        self.num_scheduled += batch.num_tokens
        self.num_generated += len(committed.token_ids)
        self.ended += [ended.key.request_id for ended in committed.finished]
        return batch.num_scheduled_tokens()

    def run(self, until: str | None = None) -> int:
        """Executes steps until the request `until`, or every request, has ended. Returns their number."""
        before = self.num_steps
        while until not in self.ended and self.step():
            pass
        return self.num_steps - before
