"""What every knob of the scheduler does, and what it costs when it is overdone. The figures can be worked out by hand.
test_draft_budget.py has the knob for drafts.
"""

from typing import Any

import numpy as np
import pytest

from protocol.errors import InvalidRequest
from tests.engine.scheduler.timed_engine import Engine


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
    # Overdone: each of the 200 waits for a step of the whole budget before its next token.
    assert sum(num_scheduled.values()) == budget


def test_max_num_seqs_far_above_what_the_kv_holds_thrashes_and_is_damped() -> None:
    """The load is 64 answers of 200 tokens after prompts of 56. A pool of 128 blocks holds 8 of them whole."""
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
    """Blocks x block size / context can run at once. Contexts of 256 tokens, reserved in one piece, never preempt."""
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
    """There is one seat, and an urgent request of one step comes in every step. Priority 5 is worth 5 aging times,
    which are 5 s or 250 steps.
    """
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


def test_answers_come_before_prompts_that_run_longer() -> None:
    """Beside 5 decodes a step is filled up to 8 tokens. The 3 left are for two prompts that alone would take 5 each."""
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
