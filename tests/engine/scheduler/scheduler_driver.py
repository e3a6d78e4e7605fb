"""A scheduler with short names for what tests do to it."""

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch
from engine.scheduler.outcome import Committed, Events
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import KVRole, Request
from protocol.messages import RequestKey, SamplingParams
from tests.engine.scheduler.chain_model import VOCAB_SIZE, ChainModel


def key_of(name: str) -> RequestKey:
    return RequestKey(1, name, 1)


class Driver:
    """Executes one step at a time on the chain model, and keeps all that came out, by request name."""

    def __init__(
        self, num_blocks: int = 20, *, eos_token_ids: tuple[int, ...] = (), clock: Any = None, **knobs: Any
    ) -> None:
        defaults = {
            "block_size": 4,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": 64,
            "priority_aging_s": 0,
        }
        config = EngineConfig(**(defaults | knobs))
        self.model = ChainModel(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            num_host_blocks=config.num_host_blocks,
            eos_token_ids=eos_token_ids,
            proposer=self.model,
            clock=clock,
        )
        self.answers: dict[str, list[int]] = {}
        self.offsets: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.batches: list[Batch] = []
        self._names: dict[int, str] = {}

    def add(
        self,
        name: str,
        num_prompt: int,
        max_tokens: int = 4,
        *,
        kv: KVRole = "local",
        first: int = 0,
        priority: int = 0,
        arrival: float | None = None,
        offset: int = 0,
        **sampling: Any,
    ) -> Request:
        """Adds a request. Its prompt counts up from `first`, so prompts with equal ones share blocks."""
        request_number = len(self._names)
        prompt = np.arange(first, first + num_prompt, dtype=np.int32) % VOCAB_SIZE
        prompt.setflags(write=False)  # a prompt that comes in a message may be read-only
        request = Request(
            key=key_of(name),
            request_number=request_number,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(**sampling),
            kv=kv,
            priority=priority,
            arrival=float(request_number) if arrival is None else arrival,
            offset=offset,
        )
        self.scheduler.add(request)
        self._names[request_number] = name
        self.answers[name], self.offsets[name] = [], []
        return request

    def schedule(self) -> tuple[dict[str, int], Events]:
        batch = self.scheduler.schedule()
        events = self.scheduler.take_events()
        self.ended |= {key.request_id: reason for key, reason in events.ended}
        if batch is None:
            return {}, events
        self.batches.append(batch)
        return batch.num_scheduled_tokens(), events

    def commit(self) -> Committed:
        committed = self.scheduler.commit(self.model.execute(self.batches.pop(0)))
        start = 0
        for request_number, offset, count in zip(
            committed.request_numbers.tolist(), committed.offsets.tolist(), committed.counts.tolist(), strict=True
        ):
            self.answers[self._names[request_number]] += committed.token_ids[start : start + count].tolist()
            self.offsets[self._names[request_number]].append(offset)
            start += count
        self.ended |= {finished.key.request_id: finished.finish_reason for finished in committed.finished}
        return committed

    def step(self) -> tuple[dict[str, int], Events]:
        num_scheduled, events = self.schedule()
        if num_scheduled:
            self.commit()
        return num_scheduled, events

    def run(self, max_num_steps: int = 500) -> None:
        """Executes steps until nothing can be scheduled."""
        for _ in range(max_num_steps):
            if not self.step()[0]:
                return
        raise AssertionError("no end")
