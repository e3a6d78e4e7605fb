"""What the scheduler does in each preemption mode. Blocks have 4 tokens."""

from typing import Any

import pytest

from engine.runner import Batch
from engine.scheduler.host_pool import HostPool
from engine.scheduler.preemption import Choice
from protocol.errors import ProtocolError
from tests.engine.scheduler.chain_model import answer_of
from tests.engine.scheduler.scheduler_driver import Driver, key_of

NO_CACHE: dict[str, Any] = {"enable_prefix_caching": False}


def driver(num_blocks: int = 7, **knobs: Any) -> Driver:
    """Six blocks and two prompts of 8 tokens: a grows until b, the newest, has to go with 12 computed tokens."""
    defaults = NO_CACHE | {"preemption": "swap", "num_host_blocks": 6}
    made = Driver(num_blocks=num_blocks, **(defaults | knobs))
    made.add("a", 8, 12)
    made.add("b", 8, 12, first=4)
    return made


def until_preempted(driver: Driver) -> Batch:
    """Executes steps up to the schedule that evicts. Its batch, which is returned, is in flight."""
    while True:
        _, events = driver.schedule()
        if events.preempted:
            assert events.preempted == [key_of("b")]
            return driver.batches[0]
        driver.commit()


def check_answers(driver: Driver) -> None:
    driver.run()
    for name, first in (("a", 0), ("b", 4)):
        prompt = [token % 13 for token in range(first, first + 8)]
        assert driver.answers[name] == answer_of(prompt, 12, max_model_len=64, stops=frozenset())
    driver.scheduler.check_idle()


# ---- swap


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    swap = driver()
    batch = until_preempted(swap)
    assert batch.num_scheduled_tokens() == {"a": 1}
    assert batch.swap_out is not None and len(batch.swap_out) == 3 and batch.swap_in is None
    ((tokens, host_blocks),) = swap.scheduler.swapped
    assert len(tokens) == 12 and batch.swap_out[:, 1].tolist() == host_blocks
    assert swap.scheduler.num_free_host_blocks == 3
    swap.commit()
    while "b" not in swap.schedule()[0]:
        swap.commit()
    (batch,) = swap.batches
    assert batch.swap_in is not None and batch.swap_in[:, 0].tolist() == host_blocks
    assert (batch.num_computed.tolist(), batch.num_scheduled.tolist()) == ([12], [1])
    assert swap.scheduler.num_free_host_blocks == 6
    swap.commit()
    check_answers(swap)
    assert swap.scheduler.num_recomputed_tokens == 0


def test_what_the_prefix_cache_kept_is_not_copied_back() -> None:
    swap = driver(enable_prefix_caching=True)
    batch = until_preempted(swap)
    assert batch.swap_out is not None and len(batch.swap_out) == 3
    swap.commit()
    while "b" not in (resumed := swap.schedule())[0]:
        swap.commit()
    assert swap.batches[0].swap_in is not None
    assert len(swap.batches[0].swap_in) == 2, "a took two of the three blocks"
    assert resumed[1].resumed == [(key_of("b"), 12)]
    swap.commit()
    check_answers(swap)


def test_swapped_in_blocks_can_be_found() -> None:
    """a took blocks that b had lost. Their copies are findable again once they are swapped in."""
    swap = driver(enable_prefix_caching=True)
    until_preempted(swap)
    swap.commit()
    while "b" not in swap.schedule()[0]:
        swap.commit()
    table = swap.scheduler._state.table
    visible = set(swap.scheduler.blocks.visible().values())
    assert set(table.blocks_of(0)[:3]) <= visible


def test_a_full_host_pool_means_recomputing() -> None:
    swap = driver(num_host_blocks=2)
    while not (events := swap.step()[1]).preempted:
        pass
    assert events.choices == [Choice("recompute", "host_full")]
    check_answers(swap)
    assert swap.scheduler.num_recomputed_tokens == 12


def test_nothing_is_reserved_in_blocks_that_are_still_to_be_copied_out() -> None:
    """A transfer into them could not wait: neither in the step that evicted, nor in a second one in flight."""
    swap = Driver(num_blocks=7, preemption="swap", num_host_blocks=6, scheduling_policy="priority", **NO_CACHE)
    swap.add("a", 8, 16)
    swap.add("b", 8, 12, first=4, priority=2)
    swap.step()
    remote = swap.add("remote", 3, 9, kv="consumer", first=3, priority=1)
    while not (events := swap.schedule()[1]).preempted:
        swap.commit()
        if len(swap.answers["b"]) == 4:
            swap.scheduler.offer(remote.key)  # it is the head of the queue now, and finds no block
    assert swap.batches[0].swap_out is not None
    assert swap.scheduler.num_free_blocks >= 1 and not events.reserved
    num_scheduled, events = swap.schedule()
    assert (num_scheduled, events.reserved) == ({}, [])
    swap.commit()
    assert swap.schedule()[1].reserved


def test_a_step_without_sequences_still_copies() -> None:
    """b's blocks also belong to c, which is being received: a gains nothing when b is evicted."""
    swap = Driver(num_blocks=6, preemption="swap", num_host_blocks=6)
    swap.add("a", 8, 4)
    swap.add("b", 8, 4, first=4)
    request = swap.add("c", 8, 4, kv="consumer", first=4)
    swap.scheduler.offer(request.key)
    (reserved,) = swap.step()[1].reserved
    assert reserved.num_cached_tokens == 8
    num_scheduled, events = swap.schedule()
    assert (num_scheduled, events.preempted) == ({}, [key_of("b")])
    (batch,) = swap.batches
    assert batch.swap_out is not None and len(batch.swap_out) == 2
    assert not len(swap.commit().request_numbers)
    assert swap.schedule()[0] == {}
    swap.scheduler.arrive(request.key, swap.answers["b"][0])
    swap.run()
    assert swap.ended == dict.fromkeys("abc", "length")
    assert swap.answers["b"] == swap.answers["c"]
    swap.scheduler.check_idle()


def test_an_aborted_sequence_gives_its_host_blocks_back() -> None:
    swap = driver()
    until_preempted(swap)
    swap.scheduler.abort(key_of("b"))
    assert swap.scheduler.num_free_host_blocks == 6
    swap.commit()
    swap.run()
    swap.scheduler.check_idle()


def test_a_failed_copy_means_recomputing() -> None:
    swap = driver()
    until_preempted(swap)
    assert swap.scheduler.fail_step() == [key_of("a")]
    swap.batches.clear()
    swap.scheduler.abort(key_of("a"))
    assert (swap.scheduler.swapped, swap.scheduler.num_free_host_blocks) == ([], 6)
    assert swap.step()[0] == {"b": 13}
    assert swap.scheduler.num_recomputed_tokens == 12


def test_a_failed_copy_back_spoils_the_sequence_and_what_was_findable_of_it() -> None:
    swap = driver(enable_prefix_caching=True)
    until_preempted(swap)
    swap.commit()
    while "b" not in swap.schedule()[0]:
        swap.commit()
    (batch,) = swap.batches
    assert batch.swap_in is not None
    spoilt = swap.scheduler.fail_step()
    assert key_of("b") in spoilt
    assert not set(batch.swap_in[:, 1].tolist()) & set(swap.scheduler.blocks.visible().values())
    for key in spoilt:
        swap.scheduler.abort(key)
    swap.scheduler.check_idle()


def test_a_swapped_sequence_that_outgrew_the_pool_ends() -> None:
    swap = Driver(num_blocks=4, preemption="swap", num_host_blocks=6, max_num_seqs=1, **NO_CACHE)
    swap.add("a", 10, 30)
    swap.run()
    assert swap.ended == {"a": "length"}
    swap.scheduler.check_idle()


def test_host_blocks_have_one_owner() -> None:
    pool = HostPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(ProtocolError, match="2 host blocks asked for, 1 are free"):
        pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ProtocolError, match="more often than taken"):
        pool.release(blocks[:1])
    assert pool.num_free == 3


# ---- remote


def test_remote_gives_back_what_the_prefill_pool_has_room_for() -> None:
    """b knows 13 tokens, which need four blocks."""
    for room, choice in ((4, Choice("remote", "configured")), (3, Choice("recompute", "no_room"))):
        remote = driver(preemption="remote", num_host_blocks=0)
        remote.scheduler.set_prefill_room(room, 99)
        while not (events := remote.step()[1]).preempted:
            pass
        assert events.choices == [choice]
        assert events.returned == ([key_of("b")] if choice.mode == "remote" else [])
        if choice.mode == "remote":
            remote.run()
            assert list(remote.ended) == ["a"]
            remote.scheduler.check_idle()
        else:
            check_answers(remote)


def test_the_room_is_spent_once() -> None:
    remote = Driver(num_blocks=10, preemption="remote", **NO_CACHE)
    remote.scheduler.set_prefill_room(5, 99)
    for index, name in enumerate("abc"):
        remote.add(name, 8, 20, first=index)
    choices: list[Choice] = []
    while len(choices) < 2:
        choices += remote.step()[1].choices
    assert choices == [Choice("remote", "configured"), Choice("recompute", "no_room")]
