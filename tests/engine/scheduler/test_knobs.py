"""Every knob of the scheduler: what it does, and what it costs when it is overdone. Figures can be worked out by
hand.
"""

from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_tokens
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.arrays import Int32
from protocol.clock import VirtualClock
from protocol.errors import InvalidRequest
from protocol.messages import RequestKey, SamplingParams

STEP_S = 0.02


class Engine:
    """A scheduler and the arithmetic model, on a clock on which every step takes `STEP_S`. Blocks of 16 tokens."""

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
        """Step in which each request was first in a batch."""
        self.num_cached: dict[str, int] = {}
        self.ended: list[str] = []
        self._count = 0

    def add(
        self, name: str, num_prompt: int, max_tokens: int = 1, *, prompt: Int32 | None = None, priority: int = 0
    ) -> None:
        """Prompts differ from their first token on unless given."""
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
        """Tokens by request; empty: there is nothing to do."""
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
        """Steps until a request has ended, or all have."""
        before = self.num_steps
        while until not in self.ended and self.step():
            pass
        return self.num_steps - before


@pytest.mark.parametrize(("budget", "num_steps"), [(8192, 4), (2048, 15)])
def test_max_num_batched_tokens_cuts_prompts_and_bounds_what_decodes_wait_for(budget: int, num_steps: int) -> None:
    engine = Engine(max_num_batched_tokens=budget)
    engine.add("long", 30_000)
    assert engine.run() == num_steps
    engine.add_many(200, 8, 50)
    engine.step()
    engine.add("long", 30_000)
    num_scheduled = engine.step()
    assert num_scheduled["long"] == budget - 200
    assert 30_000 - num_scheduled["long"] == {8192: 22_008, 2048: 28_152}[budget]
    # overdone: each of the 200 waits for a step of the whole budget before its next token
    assert sum(num_scheduled.values()) == budget


def test_max_num_seqs_far_above_what_the_kv_holds_thrashes_and_is_damped() -> None:
    """64 answers of 200 tokens after prompts of 56: a pool of 128 blocks holds 8 of them whole."""
    recomputed, preempted, num_steps = {}, {}, {}
    for name, seats, limit in (("fits", 8, 0.0), ("too many", 64, 0.0), ("damped", 64, 0.3)):
        engine = Engine(
            129, max_num_batched_tokens=512, enable_prefix_caching=False, max_num_seqs=seats, thrash_limit=limit
        )
        engine.add_many(64, 56, 200)
        num_steps[name] = engine.run()
        assert engine.num_generated == 64 * 200
        recomputed[name], preempted[name] = engine.scheduler.num_recomputed_tokens, engine.num_preempted
    assert preempted["fits"] == recomputed["fits"] == 0
    assert recomputed["too many"] > 64 * 200 / 2, "with every second token one is computed that was thrown away"
    assert recomputed["damped"] < recomputed["too many"] / 2
    assert num_steps["too many"] < num_steps["damped"] < num_steps["fits"]


def test_thrashing_is_seen() -> None:
    engine = Engine(129, enable_prefix_caching=False, max_num_seqs=64, thrash_limit=1000.0)
    engine.add_many(64, 56, 200)
    ratios = []
    while engine.step():
        ratios.append(engine.scheduler.thrash_ratio)
    assert max(ratios) > 0.3
    calm = Engine(129, max_num_seqs=8, thrash_limit=1000.0)
    calm.add_many(64, 56, 200)
    calm.run()
    assert calm.scheduler.thrash_ratio == 0


@pytest.mark.parametrize("num_blocks", [65, 129])
def test_the_pool_bounds_how_many_run_at_once(num_blocks: int) -> None:
    """N_max = blocks x block size / context; contexts of 256 tokens, reserved in one piece, never preempt."""
    engine = Engine(num_blocks, prompt_reservation="hold")
    engine.add_many(40, 255, 1)
    engine.run()
    assert engine.most_running == (num_blocks - 1) * 16 // 256
    assert engine.num_preempted == 0


@pytest.mark.parametrize(("threshold", "num_steps", "starts_at"), [(0, 2, 1), (512, 8, 0), (16, 250, 0)])
def test_long_prefill_token_threshold_lets_others_in_and_multiplies_steps(
    threshold: int, num_steps: int, starts_at: int
) -> None:
    engine = Engine(max_num_batched_tokens=2048, long_prefill_token_threshold=threshold)
    engine.add("long", 4000)
    engine.add("short", 100, 300)
    assert engine.run(until="long") == num_steps
    assert engine.started_at["short"] == starts_at
    alone = Engine(max_num_batched_tokens=2048, long_prefill_token_threshold=threshold)
    alone.add("long", 4000)
    assert alone.run() == 2, "lifted where nobody else is there to let in"


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_it_fits_into() -> None:
    waited = {}
    for chunked in (True, False):
        engine = Engine(max_num_batched_tokens=512, enable_chunked_prefill=chunked)
        engine.add_many(4, 8, 60)
        engine.step()
        engine.add("prompt", 512)
        engine.run()
        waited[chunked] = engine.started_at["prompt"]
        if not chunked:
            with pytest.raises(InvalidRequest, match="512 tokens while enable_chunked_prefill is off"):
                engine.add("longer", 513)
    assert waited == {True: 1, False: 60}


@pytest.mark.parametrize(
    ("knobs", "starts_at"),
    [
        ({"scheduling_policy": "fcfs"}, 1),
        ({"scheduling_policy": "priority", "priority_aging_s": 0}, None),
        ({"scheduling_policy": "priority", "priority_aging_s": 1.0}, 250),
    ],
)
def test_priority_starves_the_low_until_they_age(knobs: dict[str, Any], starts_at: int | None) -> None:
    """One seat, and an urgent request of one step in every step. Priority 5 is worth 5 aging times: 5 s, 250 steps."""
    engine = Engine(max_num_seqs=1, **knobs)
    engine.add("urgent", 8, priority=0)
    engine.add("low", 8, priority=5)
    for index in range(600):
        engine.add(f"urgent-{index}", 8, priority=0)
        engine.step()
    started = engine.started_at.get("low")
    assert started == starts_at if starts_at != 250 else started is not None and 250 <= started <= 502
    assert len(engine.ended) == 600, "nobody's order costs a step"


@pytest.mark.parametrize(
    ("watermark", "few_preemptions", "max_running"), [(0.0, False, 32), (0.3, True, 24), (0.95, True, 1)]
)
def test_the_watermark_trades_concurrency_for_preemptions(
    watermark: float, few_preemptions: bool, max_running: int
) -> None:
    engine = Engine(129, enable_prefix_caching=False, watermark=watermark)
    engine.add_many(64, 56, 120)
    engine.run()
    assert (engine.num_preempted < 30) == few_preemptions
    assert engine.most_running <= max_running
    if max_running == 1:
        assert engine.num_steps == 64 * 120, "overdone: one after the other"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_by_swap_computes_nothing_twice_and_needs_host_memory(mode: str) -> None:
    engine = Engine(129, enable_prefix_caching=False, preemption=mode, num_host_blocks=512)
    engine.add_many(64, 56, 200)
    engine.run()
    assert engine.num_preempted > 20
    assert (engine.scheduler.num_recomputed_tokens == 0) == (mode == "swap")


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_caching_computes_a_shared_prompt_once_and_takes_no_room(caching: bool) -> None:
    engine = Engine(65, enable_prefix_caching=caching)
    prompt = np.arange(800, dtype=np.int32)
    engine.add("first", 800, prompt=prompt)
    engine.run()
    engine.add("again", 800, prompt=prompt)
    assert engine.step() == {"again": 16 if caching else 800}, "the last block is computed again: one token at least"
    assert engine.num_cached["again"] == (784 if caching else 0)
    assert engine.scheduler.num_free_blocks == 64, "what is only cached is free"
    engine.add("other", 1000)
    assert engine.step() == {"other": 1000}


def test_max_model_len_bounds_what_one_request_can_take_from_the_others() -> None:
    taken = {}
    for max_model_len in (256, 2000):
        engine = Engine(129, max_model_len=max_model_len, enable_prefix_caching=False, max_num_seqs=8)
        engine.add("endless", 16, 100_000)
        engine.add_many(7, 128, 100)
        engine.run()
        taken[max_model_len] = engine.num_preempted
        assert engine.num_generated == 7 * 100 + max_model_len - 16
        with pytest.raises(InvalidRequest, match=f"max_model_len - 1 = {max_model_len - 1} tokens"):
            engine.add("long", max_model_len)
    engine = Engine(129, max_model_len=2000, enable_prefix_caching=False, max_num_seqs=8)
    engine.add("endless", 16, 100_000)
    for _ in range(1200):
        engine.step()
    engine.add_many(7, 128, 100)
    engine.run()
    assert engine.most_running < 8, "overdone: one answer sits on most of the pool"


@pytest.mark.parametrize(("sizes", "padding"), [((1, 2, 4, 8, 16), 3), ((64,), 59), ((4,), 0)])
def test_cuda_graph_sizes_pad_decodes(sizes: tuple[int, ...], padding: int) -> None:
    engine = Engine(cuda_graph_sizes=sizes)
    engine.add_many(5, 8, 11)
    engine.run()
    assert engine.num_steps == 11
    assert engine.scheduler.num_padding_tokens == 10 * padding, (
        "beyond the largest size nothing is padded, nor replayed"
    )


@pytest.mark.parametrize(("pad_with_prefill", "num_steps"), [(False, 1), (True, 20)])
def test_pad_with_prefill_makes_padding_useful_and_prompts_slow(pad_with_prefill: bool, num_steps: int) -> None:
    engine = Engine(cuda_graph_sizes=(8,), pad_with_prefill=pad_with_prefill, long_prefill_token_threshold=0)
    engine.add_many(5, 8, 50)
    engine.step()
    engine.add("prompt", 60)
    before = engine.scheduler.num_padding_tokens
    assert engine.run(until="prompt") == num_steps
    assert engine.scheduler.num_padding_tokens == before
    if pad_with_prefill:
        assert engine.num_scheduled == 5 * 8 + 20 * 8


class Guesses:
    """Drafts for every sequence, all right or all wrong."""

    def __init__(self, *, right: bool) -> None:
        self._right = right

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        if not self._right:
            return [0] * max_num_drafts
        num_prompt = 8
        return expected_tokens(token_ids[:num_prompt], len(token_ids) - num_prompt + max_num_drafts)[
            len(token_ids) - num_prompt :
        ]


def test_num_speculative_tokens_saves_steps_when_right_and_eats_budget_when_wrong() -> None:
    num_steps, prompt_tokens = {}, {}
    for name, count, right in (("off", 0, True), ("right", 4, True), ("wrong", 4, False)):
        engine = Engine(max_num_batched_tokens=256, num_speculative_tokens=count, proposer=Guesses(right=right))
        engine.add_many(32, 8, 41)
        engine.step()
        engine.add("prompt", 2000)
        prompt_tokens[name] = engine.step()["prompt"]
        num_steps[name] = engine.run() + 2
    assert num_steps["right"] < num_steps["off"] < num_steps["wrong"] + 1
    assert prompt_tokens == {"off": 256 - 32, "right": 256 - 5 * 32, "wrong": 256 - 5 * 32}


@pytest.mark.parametrize(("budget", "tokens"), [(512, [8] * 64), (500, [8] * 52 + [7] * 12), (64, [1] * 64)])
def test_everybody_has_a_token_before_anybody_has_a_draft(budget: int, tokens: list[int]) -> None:
    """64 answers of 71 tokens with 8 wrong drafts each: 576 tokens wanted. 500 = 64 + 6 x 64 + 52."""
    engine = Engine(
        max_num_batched_tokens=budget, max_num_seqs=64, num_speculative_tokens=8, proposer=Guesses(right=False)
    )
    engine.add_many(64, 1, 71)
    assert list(engine.step().values()) == [1] * 64
    for _ in range(62):
        assert list(engine.step().values()) == tokens
    engine.run()
    assert engine.num_steps == 71


@pytest.mark.parametrize(
    ("budget", "num_scheduled"),
    [(20, [5, 4, 4, 4, 3]), (45, [9, 9, 9, 9, 9]), (60, [9, 9, 9, 9, 24]), (5, [2, 1, 1, 1, 0])],
)
def test_drafts_and_a_prompt_share_what_the_answers_leave(budget: int, num_scheduled: list[int]) -> None:
    """One token for each of 4 answers, then one more for everybody, round by round; what 8 drafts each leave is the
    prompt's.
    """
    engine = Engine(
        max_num_batched_tokens=budget, max_num_seqs=5, num_speculative_tokens=8, proposer=Guesses(right=False)
    )
    engine.add_many(4, 1, 50)
    engine.add("prompt", 300)
    assert list(engine.step().values()) == [1, 1, 1, 1, budget - 4]
    assert (
        list((dict.fromkeys([*(f"r{index}" for index in range(4)), "prompt"], 0) | engine.step()).values())
        == num_scheduled
    )


@pytest.mark.parametrize(("chunked", "steps"), [(True, [(9, 8, 1), (7, 6, 5)]), (False, [(6, 6, 6), (6, 6, 6)])])
def test_drafts_let_newcomers_in(chunked: bool, steps: list[tuple[int, ...]]) -> None:
    """Two answers with 8 drafts each want the whole budget. Without chunks a prompt needs all its tokens at once."""
    knobs = {"max_num_batched_tokens": 18, "max_num_seqs": 4, "enable_chunked_prefill": chunked}
    engine = Engine(num_speculative_tokens=8, proposer=Guesses(right=False), **knobs)
    engine.add_many(2, 1, 50)
    engine.step()
    assert engine.step() == {"r0": 9, "r1": 9}
    engine.add("late", 6, 50)
    assert tuple(engine.step().values()) == steps[0]
    assert tuple(engine.step().values()) == steps[1]


def test_a_prompt_that_does_not_fit_beside_the_answers_takes_nothing_from_drafts() -> None:
    knobs = {"max_num_batched_tokens": 18, "max_num_seqs": 4, "enable_chunked_prefill": False}
    engine = Engine(num_speculative_tokens=8, proposer=Guesses(right=False), **knobs)
    engine.add_many(2, 1, 50)
    engine.step()
    engine.add("long", 17)
    assert engine.step() == {"r0": 9, "r1": 9}


def test_answers_come_before_prompts_that_run_longer() -> None:
    """Beside 5 decodes a step is filled up to 8 tokens: 3 for two prompts that alone would take 5 each."""
    engine = Engine(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        long_prefill_token_threshold=5,
        cuda_graph_sizes=(8,),
        pad_with_prefill=True,
    )
    engine.add("first", 20)
    engine.add("second", 20)
    engine.add_many(5, 3, 50)
    assert engine.step() == {"first": 5, "second": 5} | {f"r{index}": 3 for index in range(5)}
    assert engine.step() == {"first": 2, "second": 1} | {f"r{index}": 1 for index in range(5)}
