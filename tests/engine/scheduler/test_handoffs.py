"""Rules of the scheduler for KV that is handed over. The KV of consumers comes from elsewhere, the KV of producers is
offered to another engine.
"""

import pytest

from engine.scheduler.outcome import Reserved
from tests.engine.scheduler.chain_model import answer_of
from tests.engine.scheduler.scheduler_driver import Driver, key_of

# ---- KV that comes from elsewhere


def reserve(driver: Driver, name: str) -> Reserved:
    _, events = driver.step()
    (reserved,) = events.reserved
    assert reserved.key == key_of(name)
    return reserved


def test_a_remote_request_reserves_when_offered_and_repeats_the_first_token() -> None:
    driver = Driver()
    request = driver.add("a", 9, 4, kv="consumer", offset=7)
    assert driver.step()[1].reserved == []
    driver.scheduler.offer(request.key)
    reserved = reserve(driver, "a")
    assert len(reserved.block_ids) == 3
    assert reserved.num_cached_tokens == 0
    prompt = request.prompt_token_ids.tolist()
    driver.model.receive(reserved.block_ids, prompt, 0)
    answer = answer_of(prompt, 4, max_model_len=64, stops=frozenset())
    driver.scheduler.arrive(request.key, answer[0])
    num_scheduled, events = driver.step()
    assert num_scheduled == {"a": 1}
    assert events.admitted == [(request.key, 0)]
    assert driver.answers["a"] == answer[:2]
    driver.run()
    assert driver.answers["a"] == answer
    assert driver.offsets["a"] == [7, 9, 10]
    driver.scheduler.check_idle()


@pytest.mark.parametrize(("num_prompt", "max_tokens", "count"), [(7, 9, 2), (8, 9, 3), (8, 1, 2), (8, 2, 3), (9, 1, 3)])
def test_the_destination_holds_the_next_token_if_there_is_one(num_prompt: int, max_tokens: int, count: int) -> None:
    driver = Driver()
    driver.add("a", num_prompt, max_tokens, kv="consumer")
    driver.scheduler.offer(key_of("a"))
    assert len(reserve(driver, "a").block_ids) == count


def test_own_prefix_hits_of_a_remote_request_are_pinned_and_published_blocks_can_be_hit() -> None:
    driver = Driver()
    driver.add("a", 12, 1)
    driver.run()
    driver.add("b", 12, 4, kv="consumer")
    driver.scheduler.offer(key_of("b"))
    reserved = reserve(driver, "b")
    assert reserved.num_cached_tokens == 12
    request = driver.add("c", 12, 4, kv="consumer", first=5)
    driver.scheduler.offer(key_of("c"))
    other = reserve(driver, "c")
    assert other.num_cached_tokens == 0
    driver.model.receive(other.block_ids, request.prompt_token_ids.tolist(), 0)
    driver.scheduler.publish(key_of("c"), 11)
    driver.add("d", 12, 1, first=5)
    assert driver.step()[1].admitted == [(key_of("d"), 8)]


def test_nobody_overtakes_but_those_without_an_offer_are_skipped() -> None:
    driver = Driver(num_blocks=7, max_num_seqs=4)
    driver.add("runs", 8, 9)
    driver.step()
    driver.add("unoffered", 4, kv="consumer", first=1)
    driver.add("big", 20, first=3)
    driver.add("small", 3, first=7)
    driver.add("offered", 3, kv="consumer", first=9)
    driver.scheduler.offer(key_of("offered"))
    num_scheduled, events = driver.step()
    assert num_scheduled == {"runs": 1}
    assert events.reserved == []
    driver.scheduler.abort(key_of("big"))
    num_scheduled, events = driver.step()
    assert num_scheduled == {"runs": 1, "small": 3}
    assert [reserved.key for reserved in events.reserved] == [key_of("offered")]


def test_a_lone_sequence_waits_for_blocks_of_others_and_ends_when_it_owns_all() -> None:
    driver = Driver(num_blocks=5, prompt_reservation="none")
    driver.add("remote", 4, kv="consumer")
    driver.scheduler.offer(key_of("remote"))
    reserve(driver, "remote")
    driver.add("a", 8, 20)
    driver.step()
    assert driver.step()[0] == {}
    assert driver.ended == {}
    driver.scheduler.abort(key_of("remote"))
    driver.run()
    assert driver.ended == {"a": "length"}
    assert len(driver.answers["a"]) == 9
    driver.scheduler.check_idle()


def test_an_arrived_sequence_enters_in_a_step_that_preempted() -> None:
    driver = Driver(num_blocks=9)
    request = driver.add("remote", 7, 9, kv="consumer", first=3)
    driver.scheduler.offer(request.key)
    reserved = reserve(driver, "remote")
    driver.add("a", 12, 30)
    driver.add("b", 12, 30, first=6)
    driver.step()
    driver.model.receive(reserved.block_ids, request.prompt_token_ids.tolist(), 0)
    driver.scheduler.arrive(request.key, 1)
    num_scheduled, events = driver.step()
    assert events.preempted == [key_of("b")]
    assert num_scheduled == {"a": 1, "remote": 1}


def test_a_preempted_remote_sequence_computes_its_kv_here() -> None:
    driver = Driver(num_blocks=8)
    request = driver.add("remote", 7, 9, kv="consumer", offset=3)
    driver.add("a", 8, 9, first=5)
    driver.step()
    driver.scheduler.offer(request.key)
    reserved = reserve(driver, "remote")
    prompt = request.prompt_token_ids.tolist()
    driver.model.receive(reserved.block_ids, prompt, 0)
    answer = answer_of(prompt, 9, max_model_len=64, stops=frozenset())
    driver.scheduler.arrive(request.key, answer[0])
    driver.add("c", 4, 9, first=9)
    preempted = []
    for _ in range(60):
        preempted += driver.step()[1].preempted
    assert preempted
    assert driver.answers["remote"] == answer
    assert driver.offsets["remote"] == [3, *range(5, 12)]
    assert driver.ended == dict.fromkeys(["remote", "a", "c"], "length")
    assert driver.scheduler.num_recomputed_tokens > 0


# ---- KV that is offered


def test_an_offered_prompt_takes_all_blocks_reports_progress_and_hands_them_over() -> None:
    driver = Driver(max_num_batched_tokens=8, prompt_reservation="hold")
    request = driver.add("a", 18, 5, kv="producer")
    driver.schedule()
    assert driver.scheduler.num_free_blocks == 19 - 5
    blocks = driver.scheduler.block_ids(request.key)
    assert driver.commit().progressed == [(request.key, 8)]
    driver.schedule()
    assert driver.commit().progressed == [(request.key, 16)]
    driver.schedule()
    assert driver.schedule()[0] == {}, "nothing past the prompt, not even with a step in flight"
    committed = driver.commit()
    (done,) = committed.prompts
    assert (done.block_ids, done.finish_reason, committed.first) == (blocks, None, [request.key])
    assert committed.token_ids.tolist() == [done.first_token_id]
    assert driver.scheduler.idle
    driver.scheduler.check_idle()
    assert driver.scheduler.num_free_blocks == 14
    driver.scheduler.blocks.free(done.block_ids)
    driver.scheduler.check_idle()
    assert driver.scheduler.num_free_blocks == 19


def test_an_offered_prompt_whose_first_token_ends_it_says_so() -> None:
    driver = Driver(prompt_reservation="hold")
    driver.add("a", 5, 1, kv="producer")
    driver.schedule()
    assert driver.commit().prompts[0].finish_reason == "length"


def test_detached_blocks_are_kept_until_freed_and_until_the_step_in_flight_has_committed() -> None:
    driver = Driver(prompt_reservation="hold", enable_prefix_caching=False)
    request = driver.add("a", 8, kv="producer")
    driver.schedule()
    blocks = driver.scheduler.detach(request.key)
    assert driver.scheduler.detach(request.key) == []
    driver.scheduler.blocks.free(blocks)
    assert driver.scheduler.num_free_blocks == 17
    committed = driver.commit()
    assert committed.prompts == []
    assert len(committed.request_numbers) == 0
    assert driver.scheduler.num_free_blocks == 19
    driver.scheduler.check_idle()
