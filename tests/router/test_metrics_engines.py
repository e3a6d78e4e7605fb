"""What engines report to the router, for loads whose numbers are worked out by hand. Blocks have 4 tokens, and a step
has a budget of 8 tokens.
"""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler.step_counts import StepCounts
from protocol.messages import ReplicaStatus
from tests.pool_world import ROUTER, DecodeWorld, PrefillWorld, World, key


def last_status(world: World) -> ReplicaStatus:
    world.pass_time(1.0)
    status: ReplicaStatus = world.sent(ReplicaStatus)[-1][1]
    return status


def counted(world: World, *names: str) -> tuple[float, ...]:
    counters = last_status(world).counters
    return tuple(counters[name] for name in names)


def run(world: World) -> None:
    while world.step():
        continue


def alone(world: DecodeWorld, name: str, request_number: int, num_prompt: int, max_tokens: int) -> None:
    """Sends a colocated request. Each has its own salt, so that they share no prefix."""
    message = world.request(
        num_prompt,
        key=key(name),
        request_number=request_number,
        role="colocated",
        peer=None,
        max_tokens=max_tokens,
        cache_salt=name,
    )
    world.say(ROUTER, message)


def test_a_prefill_engine_counts_prompts_and_their_prefix() -> None:
    world = PrefillWorld()
    world.generate(10, key=key("first"), request_number=1)
    run(world)
    assert counted(world, "steps", "scheduled_tokens", "budget_tokens", "scheduled_sequences") == (2, 10, 16, 2)
    world.generate(10, key=key("second"), request_number=2)
    run(world)
    assert counted(world, "prompt_tokens", "cached_tokens", "prefix_query_tokens", "generated_tokens") == (12, 8, 20, 2)
    status = last_status(world)
    assert status.distributions["step_tokens"].total == status.counters["scheduled_tokens"] == 12
    assert sum(status.distributions["step_seconds"].counts) == status.counters["steps"] == 3


def test_a_decode_engine_counts_what_it_pulls() -> None:
    world = DecodeWorld()
    for name, request_number in (("first", 1), ("second", 2)):
        world.generate(10, key=key(name), request_number=request_number)
        world.handoff(10, key=key(name))
        world.step()  # reserves
        world.finish_pulls()
        run(world)
    assert counted(world, "transferred_tokens", "cached_tokens") == (10 + 2, 8)
    assert counted(world, "prefix_query_tokens", "prompt_tokens") == (20, 0)
    assert counted(world, "pulls", "pulled_bytes") == (2, (3 + 1) * 32)
    # The first of four tokens comes from the prefill engine.
    assert counted(world, "generated_tokens", "scheduled_tokens") == (6, 6)
    assert last_status(world).transport == "local"


def test_a_preemption_and_what_it_costs() -> None:
    """There are five blocks. a grows to 17 tokens; b loses its 7 computed ones and starts again when a is gone."""
    world = DecodeWorld(num_blocks=6, enable_prefix_caching=False)
    alone(world, "a", 1, num_prompt=8, max_tokens=10)
    alone(world, "b", 2, num_prompt=4, max_tokens=12)
    run(world)
    assert counted(world, "preemptions_recompute", "preemptions_swap", "preemptions_remote") == (1, 0, 0)
    assert counted(world, "recomputed_tokens") == (7,)
    assert counted(world, "scheduled_tokens") == ((8 + 9) + (4 + 11) + 7,)
    assert counted(world, "generated_tokens", "prompt_tokens") == (10 + 12, 8 + 4)
    assert counted(world, "prefix_query_tokens", "cached_tokens") == (0, 0)


def test_what_the_prefix_cache_kept_is_not_recomputed() -> None:
    """a ends within four blocks, so the first block of b is still in the cache."""
    world = DecodeWorld(num_blocks=6)
    alone(world, "a", 1, num_prompt=8, max_tokens=8)
    alone(world, "b", 2, num_prompt=4, max_tokens=12)
    run(world)
    assert counted(world, "preemptions_recompute", "recomputed_tokens", "cached_tokens") == (1, 7 - 4, 0)
    assert counted(world, "scheduled_tokens") == ((8 + 7) + (4 + 11) + 3,)


def test_blocks_are_reported_by_state() -> None:
    world = DecodeWorld()
    alone(world, "a", 1, num_prompt=8, max_tokens=2)
    run(world)
    status = last_status(world)
    assert (status.num_free_blocks, status.num_cached_blocks, status.num_held_blocks) == (16, 2, 0)


def test_padding_is_what_a_captured_size_adds_to_a_step_of_decodes() -> None:
    world = DecodeWorld(cuda_graph_sizes=(2, 4))
    for name, request_number in (("a", 1), ("b", 2), ("c", 3)):
        alone(world, name, request_number, num_prompt=2, max_tokens=3)
    run(world)
    assert counted(world, "steps", "scheduled_tokens", "padding_tokens") == (3, 6 + 3 + 3, 2)


def test_drafts_count_when_scheduled_and_when_the_model_confirms_them() -> None:
    counters = dict.fromkeys(StepCounts.KEYS, 0.0)
    shared = np.zeros((2, 8), np.int32)
    batch = Batch(
        step=0,
        rows=np.array([0, 1], np.int32),
        num_scheduled=np.array([4, 2], np.int32),
        num_computed=np.array([3, 0], np.int32),
        sample=np.array([True, False]),
        token_ids=shared,
        block_tables=shared,
        num_drafts=np.array([3, 0], np.int32),
    )
    output = StepOutput(token_ids=shared, counts=np.array([3, 0], np.int32), seconds=0.5)
    StepCounts(counters, EngineConfig(max_num_batched_tokens=16, max_num_seqs=2)).committed(batch, output)
    assert {name: value for name, value in counters.items() if value} == {
        "steps": 1,
        "step_seconds": 0.5,
        "budget_tokens": 16,
        "scheduled_tokens": 6,
        "scheduled_sequences": 2,
        "drafts": 3,
        "accepted_drafts": 2,
    }


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_kernels_that_a_step_waited_for_are_counted_and_named(pool: str, caplog: pytest.LogCaptureFixture) -> None:
    world: PrefillWorld | DecodeWorld
    if pool == "prefill":
        world = PrefillWorld()
        world.generate(10, key=key("one"), request_number=1)
    else:
        world = DecodeWorld()
        alone(world, "one", 1, num_prompt=10, max_tokens=3)
    world.step()
    assert counted(world, "kernel_compilations") == (0,) and not caplog.records
    batch = world.service.schedule()
    assert batch is not None
    output = world.runner.execute(batch)
    output.compiled = ("draw_kernel a", "draw_kernel b")
    world.service.commit(output)
    assert counted(world, "kernel_compilations") == (2,)
    assert vars(caplog.records[0])["kernels"] == ("draw_kernel a", "draw_kernel b")
