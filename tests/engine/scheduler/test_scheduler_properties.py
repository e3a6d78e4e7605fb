"""The scheduler under arbitrary loads: no sequence's KV is touched by others, every answer is right, every request
ends, and nothing leaks.

The file is longer than 300 lines because it is one state machine: its rules and invariants share what is in flight.
"""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig
from engine.runner import Batch
from engine.scheduler.outcome import Committed, Reserved
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import KVRole, Request
from protocol.clock import VirtualClock
from protocol.errors import InvalidRequest
from protocol.messages import RequestKey, SamplingParams
from tests.engine.scheduler.chain_model import VOCAB_SIZE, ChainModel, answer_of

EOS = 12
OFFSET = 100
"""Every request claims that so many tokens of its answer were delivered before."""


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        draw = data.draw
        self.offers = draw(st.booleans(), "offers")
        depth = draw(st.sampled_from([1, 2]), "depth")
        spec = draw(st.sampled_from([0, 0, 3]), "num_speculative_tokens") if depth == 1 and not self.offers else 0
        self.depth = depth
        budget = draw(st.sampled_from([3, 7, 16, 64]), "budget")
        sizes = draw(st.sampled_from([(), (), (1, 2, 4), (8,)]), "cuda_graph_sizes")
        self.config = EngineConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=min(budget, draw(st.sampled_from([1, 2, 4, 8]), "seqs")),
            cuda_graph_sizes=sizes,
            pad_with_prefill=bool(sizes),
            max_model_len=draw(st.sampled_from([24, 40]), "max_model_len"),
            block_size=draw(st.sampled_from([1, 2, 4]), "block_size"),
            enable_chunked_prefill=draw(st.booleans(), "chunked"),
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 5]), "threshold"),
            enable_prefix_caching=draw(st.sampled_from([True, True, False]), "caching"),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"]), "policy"),
            prompt_reservation="hold"
            if self.offers
            else draw(st.sampled_from(["none", "check", "hold"]), "reservation"),
            watermark=draw(st.sampled_from([0.0, 0.0, 0.2]), "watermark"),
            priority_aging_s=draw(st.sampled_from([0, 10]), "aging"),
            num_speculative_tokens=spec,
            **self.preemption_knobs(draw),
        )
        num_blocks = draw(st.integers(4, 30), "num_blocks")
        self.model = ChainModel(num_blocks, self.config.block_size)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            num_host_blocks=self.config.num_host_blocks,
            eos_token_ids=(EOS,),
            proposer=self.model,
            clock=self.clock,
        )
        self.requests: dict[RequestKey, Request] = {}
        self.received: dict[RequestKey, list[int]] = {}
        self.unoffered: list[RequestKey] = []
        self.reserved: list[Reserved] = []
        self.owned_outside: list[list[int]] = []
        self.batches: list[Batch] = []
        self.written: list[set[int]] = []
        """Blocks that each batch in flight writes into."""
        self.count = 0

    def preemption_knobs(self, draw: Any) -> dict[str, Any]:
        return {}

    # ---- what happens to a scheduler

    @rule(
        length=st.integers(1, 30),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 12),
        kv=st.sampled_from(["local", "other"]),
        priority=st.integers(0, 2),
        stop=st.sampled_from([(), (), (5,)]),
        ignore_eos=st.booleans(),
    )
    def add(
        self, length: int, family: int, max_tokens: int, kv: str, priority: int, stop: tuple[int, ...], ignore_eos: bool
    ) -> None:
        self.count += 1
        prompt = [(position * (family + 3)) % VOCAB_SIZE for position in range(length)]
        if self.count % 3 == 0:
            prompt[-1] = self.count % VOCAB_SIZE
        key = RequestKey(1, f"r{self.count}", 1)
        kind: KVRole = "local" if kv == "local" else "producer" if self.offers else "consumer"
        request = Request(
            key=key,
            request_number=self.count,
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=max_tokens,
            sampling=SamplingParams(stop_token_ids=stop, ignore_eos=ignore_eos),
            kv=kind,
            offset=OFFSET,
            priority=priority,
            arrival=float(self.count),
        )
        stops = frozenset(stop) | (frozenset() if ignore_eos else {EOS})
        # An engine that offers a prompt does not decide how long its answer may grow.
        max_model_len = length + max_tokens if kind == "producer" else self.config.max_model_len
        answer = answer_of(prompt, max_tokens, max_model_len=max_model_len, stops=stops)
        if kind == "consumer" and len(answer) == 1:
            return
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            return
        self.requests[key], self.received[key] = request, []
        self.model.answers[key], self.model.num_prompt[key] = answer, length
        if kind == "consumer":
            self.unoffered.append(key)

    @rule(count=st.integers(3, 8), length=st.integers(1, 9), kv=st.sampled_from(["local", "other"]))
    def burst(self, count: int, length: int, kv: str) -> None:
        """Adds many short prompts with long answers: more than the pool can hold once they grow."""
        for index in range(count):
            self.add(length + index % 3, index % 2, 12, kv, index % 3, (), True)

    @precondition(lambda self: self.unoffered)
    @rule(pick=st.integers(0, 1000))
    def offer(self, pick: int) -> None:
        key = self.unoffered.pop(pick % len(self.unoffered))
        self.scheduler.offer(key)
        self.scheduler.offer(key)

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 1000))
    def arrive(self, pick: int) -> None:
        reserved = self.reserved.pop(pick % len(self.reserved))
        prompt = self.requests[reserved.key].prompt_token_ids.tolist()
        half = len(prompt) // 2
        self.model.receive(reserved.block_ids, prompt[:half], min(reserved.num_cached_tokens, half))
        self.scheduler.publish(reserved.key, half)
        self.model.receive(reserved.block_ids, prompt, max(reserved.num_cached_tokens, half))
        self.scheduler.arrive(reserved.key, self.model.answers[reserved.key][0])

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 1000), keep=st.booleans())
    def abort(self, pick: int, keep: bool) -> None:
        key = list(self.requests)[pick % len(self.requests)]
        if keep:
            self.owned_outside.append(self.scheduler.detach(key))
        else:
            self.scheduler.abort(key)
        self.scheduler.abort(key)
        self._forget(key)

    @precondition(lambda self: self.owned_outside)
    @rule(pick=st.integers(0, 1000))
    def end_lease(self, pick: int) -> None:
        self.scheduler.blocks.free(self.owned_outside.pop(pick % len(self.owned_outside)))

    @rule()
    def schedule(self) -> None:
        if len(self.batches) >= self.depth:
            return
        self.clock.now += 0.3
        preempted_before = self.scheduler.num_running
        wanted, num_arrived, num_seats = self._wanted_drafts(), len(self.scheduler.arrived), self._num_seats()
        batch = self.scheduler.schedule()
        events = self.scheduler.take_events()
        assert not events.preempted or not self.batches
        assert not (events.preempted and events.reserved)
        assert len(events.preempted) <= preempted_before
        for key in events.returned:
            self._check_answer(key, complete=False)
        for reserved in events.reserved:
            self.model.scribble(reserved.block_ids[reserved.num_cached_tokens // self.config.block_size :])
            if reserved.key in self.requests:
                self.reserved.append(reserved)
        for key, _ in events.ended:
            self._check_answer(key, complete=False)
        if batch is None:
            return
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert batch.num_tokens or batch.swap_out is not None
        assert len(batch.rows) <= self.config.max_num_seqs
        assert len(set(batch.rows.tolist())) == len(batch.rows)
        assert (batch.num_scheduled > 0).all()
        self._check_shares(batch, wanted)
        assert len(self.scheduler.arrived) <= max(0, num_arrived - num_seats), "who arrived stands beside a free seat"
        self.batches.append(batch)
        size, tables = self.config.block_size, batch.block_tables
        ends = (batch.num_computed + batch.num_scheduled).tolist()
        chunks = zip(batch.rows.tolist(), batch.num_computed.tolist(), ends, strict=True)
        self.written.append(
            {block for row, start, end in chunks for block in tables[row, start // size : -(-end // size)].tolist()}
        )
        if batch.swap_in is not None:
            self.written[-1].update(batch.swap_in[:, 1].tolist())

    def _num_seats(self) -> int:
        table = self.scheduler._state.table
        return min(self.config.max_num_seqs - len(table), len(table._free_rows))

    def _wanted_drafts(self) -> dict[str, int]:
        """How many drafts each running answer wants, by request id."""
        state = self.scheduler._state
        table, count = state.table, len(state.table)
        alone = count + len(state.waiting) + len(state.arrived) == 1
        most = (not alone and self.config.long_prefill_token_threshold) or 1000
        wants = np.minimum(table.goal[:count] - table.computed[:count], most) - 1
        return {table.request_ids[position]: int(wants[position]) for position in table.answering().nonzero()[0]}

    def _check_shares(self, batch: Batch, wanted: dict[str, int]) -> None:
        """Every running answer has its token, except the last one left if blocks lack. Numbers of drafts differ by at
        most one, unless an answer had no more.
        """
        running, passed_over = self.scheduler.running_ids, self.scheduler.passed_over
        assert passed_over in ([], running[:1]), "an answer got no token"
        assert not passed_over or wanted.keys().isdisjoint(batch.request_ids)
        if batch.num_drafts is None:
            return
        given = dict(zip(batch.request_ids, batch.num_drafts.tolist(), strict=True))
        short = [num for request_id, num in given.items() if num < wanted.get(request_id, 0)]
        if short and len(given) > 1:
            assert max(given.values()) <= min(short) + 1, "drafts are uneven"

    @precondition(lambda self: self.batches)
    @rule()
    def commit(self) -> None:
        batch = self.batches.pop(0)
        self.written.pop(0)
        self._apply(self.scheduler.commit(self.model.execute(batch)))

    @precondition(lambda self: self.batches)
    @rule(choice=st.integers(0, 9))
    def fail(self, choice: int) -> None:
        if choice:
            return
        while self.batches:
            self.batches.pop(0)
            self.written.pop(0)
            for key in self.scheduler.fail_step():
                self.scheduler.abort(key)
                self._forget(key)
        self.model.last_output = {}

    def _forget(self, key: RequestKey) -> None:
        del self.requests[key]
        self.unoffered = [other for other in self.unoffered if other != key]
        self.reserved = [reserved for reserved in self.reserved if reserved.key != key]

    def _apply(self, committed: Committed) -> None:
        by_request = {request.request_number: key for key, request in self.requests.items()}
        start = 0
        for request_number, attempt, offset, count in zip(
            committed.request_numbers.tolist(),
            committed.attempts.tolist(),
            committed.offsets.tolist(),
            committed.counts.tolist(),
            strict=True,
        ):
            key = by_request[request_number]
            assert attempt == 1
            assert offset == OFFSET + len(self.received[key])
            if not self.received[key]:
                assert key in committed.first
            self.received[key] += committed.token_ids[start : start + count].tolist()
            start += count
        assert start == len(committed.token_ids)
        for finished in committed.finished:
            answer = self.received[finished.key]
            request = self.requests[finished.key]
            stops = {*request.sampling.stop_token_ids} | (set() if request.sampling.ignore_eos else {EOS})
            assert (finished.finish_reason == "stop") == (answer[-1] in stops)
            self._check_answer(finished.key, complete=True)
        for done in committed.prompts:
            answer = self.model.answers[done.key]
            assert answer[0] == done.first_token_id
            assert (done.finish_reason is not None) == (len(answer) == 1)
            prompt = self.requests[done.key].prompt_token_ids
            assert len(done.block_ids) == -(-len(prompt) // self.config.block_size)
            self.owned_outside.append(done.block_ids)
            self._forget(done.key)
        batch = committed.batch
        ends = dict(zip(batch.request_ids, (batch.num_computed + batch.num_scheduled).tolist(), strict=True))
        for key, num_tokens in committed.progressed:
            assert num_tokens == ends[key.request_id] < len(self.requests[key].prompt_token_ids)

    def _check_answer(self, key: RequestKey, *, complete: bool) -> None:
        answer = self.model.answers[key]
        assert self.received[key] == (answer if complete else answer[: len(self.received[key])])
        self._forget(key)

    # ---- what must always hold

    @invariant()
    def every_reference_has_an_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.blocks.check()
        scheduler.check_idle()
        owners: Counter[int] = Counter()
        table = scheduler._state.table
        for position in range(len(table)):
            owners.update(table.blocks_of(position))
        for sequence in scheduler._state.live.values():
            owners.update(sequence.blocks)
        for blocks in self.owned_outside:
            owners.update(blocks)
        references = {block: count for block, count in enumerate(scheduler.blocks.references().tolist()) if count}
        assert references == dict(owners)
        free = set(scheduler.blocks.free_in_order())
        assert all(free.isdisjoint(blocks) for blocks in self.written), (
            "a block that a step in flight writes into is free"
        )
        assert set(scheduler._state.live) == set(self.requests)
        assert scheduler.num_running <= self.config.max_num_seqs

    def teardown(self) -> None:
        """Every request ends: with all handoffs made and all leases ended, each step makes progress."""
        if not hasattr(self, "scheduler"):
            return
        num_open = -1
        for _ in range(5000):
            self.every_reference_has_an_owner()
            while self.unoffered:
                self.offer(0)
            while self.reserved:
                self.arrive(0)
            while self.owned_outside:
                self.end_lease(0)
            for _ in range(self.depth):
                self.schedule()
            if self.batches:
                self.commit()
            elif not self.requests:
                break
            else:
                assert self.reserved or len(self.requests) != num_open, "a step without progress"
            num_open = len(self.requests)
        while self.owned_outside:
            self.end_lease(0)
        assert not self.requests
        assert self.scheduler.idle
        self.scheduler.check_idle()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
