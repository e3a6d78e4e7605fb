"""Rules of the scheduler that the recorded loads do not show, one at a time. test_handoffs.py has those for KV that
is handed over.
"""

from typing import Any

import numpy as np
import pytest

from engine.runner import StepOutput
from engine.scheduler.sequence import KVRole
from protocol.clock import VirtualClock
from protocol.errors import InvalidRequest, ProtocolError
from tests.engine.scheduler.chain_model import answer_of
from tests.engine.scheduler.scheduler_driver import Driver, key_of

# ---- what is refused


@pytest.mark.parametrize(
    ("knobs", "num_prompt", "max_tokens", "kv", "field"),
    [
        ({}, 0, 4, "local", "prompt_token_ids"),
        ({}, 4, 0, "local", "max_tokens"),
        ({}, 64, 4, "local", "prompt_token_ids"),
        ({"num_blocks": 5}, 17, 4, "local", "prompt_token_ids"),
        ({"num_blocks": 5}, 16, 4, "consumer", "prompt_token_ids"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, 9, 4, "local", "prompt_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused(
    knobs: dict[str, Any], num_prompt: int, max_tokens: int, kv: KVRole, field: str
) -> None:
    driver = Driver(**knobs)
    with pytest.raises(InvalidRequest) as refusal:
        driver.add("a", num_prompt, max_tokens, kv=kv)
    assert refusal.value.field == field
    assert driver.scheduler.idle


def test_what_just_fits_is_served() -> None:
    driver = Driver(num_blocks=5)
    driver.add("a", 16, 1)
    driver.add("b", 16, 1, kv="consumer")
    driver.run()
    assert driver.ended == {"a": "length"}


def test_a_key_is_taken_once() -> None:
    driver = Driver()
    driver.add("a", 4)
    with pytest.raises(ProtocolError, match="live already"):
        driver.add("a", 4)


# ---- ends


def test_an_answer_ends_at_max_tokens_or_max_model_len() -> None:
    driver = Driver(max_model_len=12)
    driver.add("a", 4, 3)
    driver.add("b", 10, 50)
    driver.run()
    assert driver.ended == {"a": "length", "b": "length"}
    assert [len(driver.answers[name]) for name in "ab"] == [3, 2]
    driver.scheduler.check_idle()


def test_stop_tokens_end_an_answer_and_belong_to_it() -> None:
    prompt = list(range(5))
    answer = answer_of(prompt, 20, max_model_len=64, stops=frozenset())
    stop = answer[2]
    expected = answer[: answer.index(stop) + 1]
    eos = Driver(eos_token_ids=(stop,))
    eos.add("a", 5, 20)
    eos.add("ignores", 5, 20, ignore_eos=True)
    eos.add("own", 5, 20, ignore_eos=True, stop_token_ids=(stop,))
    eos.run()
    assert eos.answers == {"a": expected, "ignores": answer, "own": expected}
    assert eos.ended == {"a": "stop", "ignores": "length", "own": "stop"}


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    answers, steps = [], []
    for num_drafts in (0, 3):
        driver = Driver(num_speculative_tokens=num_drafts, num_blocks=40)
        for index in range(3):
            request = driver.add(f"r{index}", 6 + index, 17, first=index)
            prompt = request.prompt_token_ids.tolist()
            driver.model.answers[request.key] = answer_of(prompt, 17, max_model_len=64, stops=frozenset())
            driver.model.num_prompt[request.key] = len(prompt)
        count = 0
        while driver.step()[0]:
            count += 1
        answers.append(driver.answers)
        steps.append(count)
    assert answers[0] == answers[1]
    assert steps[0] == 17
    assert steps[1] < 10


def test_drafts_forbid_a_second_step_in_flight() -> None:
    driver = Driver(num_speculative_tokens=2)
    driver.add("a", 4)
    assert driver.schedule()[0] == {"a": 4}
    driver.add("b", 4)
    assert driver.schedule()[0] == {}


# ---- steps in flight


def test_two_steps_in_flight_give_the_same_tokens_one_step_late() -> None:
    answers = []
    for depth in (1, 2):
        driver = Driver(num_blocks=30)
        for index in range(4):
            driver.add(f"r{index}", 5 + index, 9, first=index)
        for _ in range(100):
            while len(driver.batches) < depth and driver.schedule()[0]:
                pass
            if not driver.batches:
                break
            driver.commit()
        answers.append(driver.answers)
        driver.scheduler.check_idle()
    assert answers[0] == answers[1]


def test_pending_marks_what_the_runner_must_take_from_its_last_step() -> None:
    driver = Driver()
    driver.add("a", 4, 9)
    driver.schedule()
    driver.schedule()
    first, second = driver.batches
    assert first.pending is None
    assert second.pending is not None
    assert (second.pending.tolist(), second.num_computed.tolist(), second.num_scheduled.tolist()) == ([True], [4], [1])
    assert driver.schedule()[0] == {}, "never three"


def test_a_schedule_that_would_preempt_is_put_off() -> None:
    driver = Driver(num_blocks=5, enable_prefix_caching=False)
    driver.add("a", 7, 9)
    driver.add("b", 7, 9, first=3)
    assert driver.schedule()[0] == {"a": 7, "b": 7}
    driver.schedule()
    driver.commit()
    before = driver.scheduler.num_free_blocks
    assert driver.schedule() == ({}, type(driver.scheduler.take_events())())
    assert driver.scheduler.num_free_blocks == before
    driver.commit()
    assert driver.schedule()[1].preempted == [key_of("b")]


def test_a_failed_step_takes_its_hashes_back() -> None:
    driver = Driver()
    driver.add("a", 8)
    driver.step()
    driver.add("b", 12, first=5)
    driver.add("same", 12, first=5)
    num_scheduled, events = driver.schedule()
    assert num_scheduled == {"a": 1, "b": 12, "same": 4}
    assert events.admitted == [(key_of("b"), 0), (key_of("same"), 8)]
    visible = driver.scheduler.blocks.visible()
    spoilt = driver.scheduler.fail_step()
    assert {key.request_id for key in spoilt} == {"a", "b", "same"}
    assert len(driver.scheduler.blocks.visible()) == len(visible) - 3
    for key in spoilt:
        driver.scheduler.abort(key)
    driver.scheduler.check_idle()
    driver.batches.clear()
    driver.add("c", 12, first=5)
    assert driver.step()[1].admitted == [(key_of("c"), 0)]


def test_a_failed_step_spoils_those_who_reserved_what_it_would_have_computed() -> None:
    driver = Driver()
    driver.add("a", 8)
    driver.schedule()
    driver.add("remote", 8, kv="consumer")
    driver.scheduler.offer(key_of("remote"))
    (reserved,) = driver.schedule()[1].reserved
    assert reserved.num_cached_tokens == 8
    assert set(driver.scheduler.fail_step()) == {key_of("a"), key_of("remote")}


def test_an_output_for_other_sequences_is_an_error() -> None:
    driver = Driver()
    driver.add("a", 4)
    driver.schedule()
    with pytest.raises(ProtocolError, match="tokens for"):
        driver.scheduler.commit(StepOutput(token_ids=np.zeros((1, 1), np.int32), counts=np.zeros(1, np.int32)))
    with pytest.raises(ProtocolError, match="without a batch"):
        driver.scheduler.commit(StepOutput(token_ids=np.zeros((0, 1), np.int32), counts=np.zeros(0, np.int32)))


@pytest.mark.parametrize(("num_drafts", "shares"), [(0, (6, 1, 1)), (2, (2, 3, 3)), (1, (4, 2, 2))])
def test_who_arrives_sits_down_before_a_running_prompt_goes_on(num_drafts: int, shares: tuple[int, ...]) -> None:
    """It also keeps its token in every step, although it runs behind the prompt."""
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=3, num_speculative_tokens=num_drafts)
    driver.add("prompt", 40)
    for index, name in enumerate("abc"):
        prompt = driver.add(name, 3, 9, kv="consumer", first=index + 1).prompt_token_ids.tolist()
        driver.model.answers[key_of(name)] = answer_of(prompt, 9, max_model_len=64, stops=frozenset())
        driver.model.num_prompt[key_of(name)] = 3
        driver.scheduler.offer(key_of(name))
    num_scheduled, events = driver.step()
    assert num_scheduled == {"prompt": 8}
    for reserved in events.reserved:
        index = "abc".index(reserved.key.request_id)
        driver.model.receive(reserved.block_ids, [index + 1, index + 2, index + 3], 0)
        driver.scheduler.arrive(reserved.key, driver.model.answers[reserved.key][0])
    assert driver.step()[0] == {"prompt": 6, "a": 1, "b": 1}
    assert driver.step()[0] == dict(zip(("prompt", "a", "b"), shares, strict=True))
    assert [sequence.request.key.request_id for sequence in driver.scheduler.arrived] == ["c"]


# ---- knobs


def test_waiting_makes_urgent() -> None:
    for aging, order in ((0.0, ["urgent", "old"]), (10.0, ["old", "urgent"])):
        driver = Driver(scheduling_policy="priority", priority_aging_s=aging)
        driver.add("old", 4, priority=3, arrival=0.0)
        driver.add("urgent", 4, priority=0, arrival=31.0)
        assert list(driver.step()[0]) == order


def test_of_equals_the_latest_added_waits_longest_and_is_evicted_first() -> None:
    driver = Driver(num_blocks=7, scheduling_policy="priority", max_num_seqs=3)
    for index, name in enumerate(("c", "a", "b", "z", "d")):
        driver.add(name, 7, first=index, arrival=0.0)
    assert list(driver.step()[0]) == ["c", "a", "b"]
    assert driver.scheduler.waiting_ids == ["z", "d"]
    driver.step()
    num_scheduled, events = driver.step()
    assert (list(num_scheduled), events.preempted) == (["c", "a"], [key_of("b")])
    assert driver.scheduler.waiting_ids == ["b", "z", "d"]


def test_the_watermark_holds_back_admissions_while_anything_runs() -> None:
    driver = Driver(num_blocks=10, watermark=0.3)
    driver.add("a", 16)
    driver.add("b", 12, first=5)
    driver.add("c", 8, first=7)
    assert driver.step()[0] == {"a": 16}
    driver.scheduler.abort(key_of("b"))
    assert driver.step()[0] == {"a": 1}
    driver.run()
    assert driver.ended == {"a": "length", "c": "length"}


def test_a_sequence_that_outgrew_the_budget_resumes_in_chunks_even_without_chunked_prefill() -> None:
    driver = Driver(num_blocks=9, enable_chunked_prefill=False, max_num_batched_tokens=10, enable_prefix_caching=False)
    driver.add("a", 9, 20)
    driver.step()
    driver.add("b", 8, 12, first=4)
    driver.run()
    assert driver.ended == {"a": "length", "b": "length"}


def test_thrashing_closes_admission_until_it_falls() -> None:
    clock = VirtualClock()
    driver = Driver(num_blocks=9, enable_prefix_caching=False, clock=clock, thrash_limit=0.2, thrash_window_s=5.0)
    driver.add("a", 8, 24)
    driver.add("b", 8, 24, first=4)
    while not driver.step()[1].preempted:
        clock.now += 1.0
    while "b" not in driver.step()[0]:
        clock.now += 1.0
    driver.add("c", 4, 24, first=7)
    assert driver.scheduler.thrash_ratio > 0.2
    assert list(driver.step()[0]) == ["b"]
    clock.now += 6.0
    assert driver.scheduler.thrash_ratio == 0.0
    assert list(driver.step()[0]) == ["b", "c"]


def test_steps_of_decodes_are_padded_and_can_be_filled_with_prompts() -> None:
    driver = Driver(cuda_graph_sizes=(1, 2, 4, 8), max_num_batched_tokens=32)
    for index in range(3):
        driver.add(f"r{index}", 4, 6, first=index)
    driver.step()
    assert driver.scheduler.num_padding_tokens == 0
    driver.step()
    assert driver.scheduler.num_padding_tokens == 1
    driver = Driver(cuda_graph_sizes=(1, 2, 4, 8), max_num_batched_tokens=32, pad_with_prefill=True)
    for index in range(3):
        driver.add(f"r{index}", 4, 6, first=index)
    driver.step()
    driver.add("long", 20, first=5)
    assert driver.step()[0] == {"r0": 1, "r1": 1, "r2": 1, "long": 1}
    assert driver.step()[0] == {"r0": 1, "r1": 1, "r2": 1, "long": 1}
