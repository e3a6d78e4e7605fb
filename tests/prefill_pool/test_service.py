"""P's table, row by row: one service under test, and everybody else played by hand.

The file is longer than 300 lines because it follows that one table.
"""

from collections.abc import Callable

import pytest

from engine.runners.arithmetic_model import expected_tokens
from protocol.errors import ProtocolError
from protocol.messages import (
    AbortRequest,
    Drain,
    EngineRequest,
    Hello,
    KVHandoff,
    KVRelease,
    KVRenew,
    KVRevoke,
    ReplicaStatus,
    SamplingParams,
    StepTokens,
)
from tests.pool_world import ROUTER, D, P, PrefillWorld, key

FIRST = expected_tokens(range(1, 11), 1)[0]


def leased() -> PrefillWorld:
    world = PrefillWorld()
    world.generate()
    world.step()
    world.step()
    return world


def lease_id(world: PrefillWorld) -> int:
    return int(world.words.max())


def release(world: PrefillWorld, outcome: str, lease: int | None = None) -> None:
    lease = lease_id(world) if lease is None else lease
    world.say(D, KVRelease(key=key(), lease_id=lease, outcome=outcome, reason="" if outcome == "consumed" else "no"))  # type: ignore[arg-type]


def test_chunks_are_offered_as_they_are_computed_and_the_first_token_goes_to_the_router() -> None:
    world = PrefillWorld()
    world.generate()
    assert world.step() == {"r": 8}
    ((to, first),) = world.sent()
    assert to == D and isinstance(first, KVHandoff)
    assert (first.num_ready_tokens, first.final, first.first_token_id, len(first.block_ids)) == (8, False, None, 3)
    assert world.words[first.lease_index] == first.lease_id == 5 << 32 | 1
    assert world.step() == {"r": 2}
    (_, last), (to, tokens) = world.sent()
    assert (last.num_ready_tokens, last.final, last.first_token_id, last.lease_id) == (10, True, FIRST, first.lease_id)
    assert to == ROUTER and isinstance(tokens, StepTokens)
    assert (tokens.request_numbers.tolist(), tokens.offsets.tolist(), tokens.token_ids.tolist(), tokens.ends) == (
        [7],
        [0],
        [FIRST],
        (),
    )
    assert set(tokens.stages[0].seconds) == {"prefill_queue", "prefill"}
    assert world.step() == {}


def test_consumed_clears_the_word_and_frees() -> None:
    world = leased()
    assert world.num_free() == 13
    release(world, "consumed")
    assert world.num_free() == 16 and not world.words.any() and world.service.idle
    world.service.check_idle()


def test_a_release_of_another_lease_is_ignored() -> None:
    world = leased()
    release(world, "consumed", lease=4)
    assert world.num_free() == 13 and not world.service.idle


def test_consumed_before_the_final_handoff_is_a_bug() -> None:
    world = PrefillWorld()
    world.generate()
    world.step()
    with pytest.raises(ProtocolError, match="before the final"):
        release(world, "consumed")


def test_a_first_token_that_ends_the_answer_needs_no_handoff() -> None:
    world = PrefillWorld(max_num_batched_tokens=16)
    world.generate(sampling=SamplingParams(stop_token_ids=(FIRST,)))
    world.step()
    ((to, message),) = world.sent()
    assert to == ROUTER and message.ends[0][:4] == (7, 1, "finished", "stop")
    assert world.service.idle and world.num_free() == 16


def test_a_first_token_that_ends_an_offered_answer_revokes() -> None:
    world = PrefillWorld()
    world.generate(max_tokens=1)
    world.step()
    world.step()
    sent = world.sent()
    assert [type(message) for _, message in sent] == [KVHandoff, KVRevoke, StepTokens]
    assert world.num_free() == 13
    release(world, "refused")
    assert world.service.idle and world.num_free() == 16 and world.ends() == []


@pytest.mark.parametrize("cause", ["abort", "deadline", "drain", "router gone"])
@pytest.mark.parametrize("offered", [False, True])
def test_what_ends_a_running_prompt(cause: str, offered: bool) -> None:
    world = PrefillWorld()
    world.generate(deadline_s=3.0 if cause == "deadline" else None)
    if offered:
        world.step()
    world.sent()
    end_it(world, cause)
    ends = {
        "abort": [],
        "deadline": ["aborted"],
        "drain": [] if offered else ["returned"],
        "router gone": ["returned"],
    }[cause]
    sent = world.sent()
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == ends
    assert [m.lease_id for _, m in sent if isinstance(m, KVRevoke)] == ([5 << 32 | 1] if offered else [])
    assert world.step() == {}
    if offered:
        assert world.num_free() == 13
        release(world, "refused")
        assert [end.kind for end in world.ends()] == (["returned"] if cause == "drain" else [])
    assert world.service.idle and world.num_free() == 16 and not world.words.any()


def end_it(world: PrefillWorld, cause: str) -> None:
    acts: dict[str, Callable[[], None]] = {
        "abort": lambda: world.say(ROUTER, AbortRequest(key=key(), reason="client")),
        "deadline": lambda: world.pass_time(3.0),
        "drain": lambda: world.drain(2.0),
        "router gone": lambda: world.pass_time(10.0),
    }
    acts[cause]()


def test_a_revoke_without_an_answer_ends_at_a_fence() -> None:
    world = leased()
    world.say(ROUTER, AbortRequest(key=key(), reason="client"))
    world.pass_time(4.9)
    assert world.words.any()
    world.pass_time(0.2)
    assert world.service.idle and not world.words.any() and world.num_free() == 16 and world.ends() == []


def test_a_lease_expires_is_fenced_revoked_and_reported() -> None:
    world = leased()
    world.sent()
    world.pass_time(30.0)
    sent = world.sent()
    assert next(type(m) for _, m in sent) is KVRevoke and sent[0][0] == D
    (end,) = [end for _, m in sent if isinstance(m, StepTokens) for end in m.ends]
    assert (end.kind, end.error) == ("failed", "lease_expired")
    assert world.num_free() == 16 and not world.words.any()
    release(world, "consumed", lease=5 << 32 | 1)  # too late: ignored
    assert world.service.idle


def test_a_renewed_lease_lives_on_until_nobody_renews_it() -> None:
    world = leased()
    renewal = KVRenew(leases=((key(), lease_id(world)),))
    for _ in range(6):
        world.pass_time(9.0)
        world.hear_router()
        world.say(D, renewal)
    for _ in range(3):
        world.pass_time(9.0)
        world.hear_router()
    assert not world.service.idle
    world.pass_time(3.0)
    assert world.service.idle and world.service.counters["expired"] == 1


def test_peer_lost_fences_at_once() -> None:
    world = leased()
    world.sent()
    world.say(ROUTER, AbortRequest(key=key(), reason="peer_lost"))
    assert [type(m) for _, m in world.sent()] == [KVRevoke]
    assert world.service.idle and world.num_free() == 16 and not world.words.any()


def test_refused_stops_computing_and_ends_the_handoffs_under_way() -> None:
    world = PrefillWorld()
    world.generate()
    world.step()
    world.sent()
    release(world, "refused")
    assert [type(m) for _, m in world.sent()] == [KVRevoke]
    assert world.service.idle and world.step() == {}


@pytest.mark.parametrize("final", [False, True])
def test_a_refusal_that_decode_cannot_tell_of_is_told_here(final: bool) -> None:
    world = leased() if final else PrefillWorld()
    if not final:
        world.generate()
        world.step()
    world.sent()
    refused = KVRelease(
        key=key(), lease_id=lease_id(world), outcome="refused", reason="early handoffs are full", router_knows=False
    )
    world.say(D, refused)
    assert [(end.request_number, end.kind, end.error) for end in world.ends()] == [
        (7, "returned", "early handoffs are full")
    ]
    assert world.service.idle


@pytest.mark.parametrize("num_prompt", [61, 62, 63])
def test_how_long_the_answer_may_be_is_not_for_prefill_to_judge(num_prompt: int) -> None:
    world = PrefillWorld(max_model_len=64)
    world.generate(num_prompt, max_tokens=20)
    while world.step():
        pass
    sent = world.sent()
    assert [m.final for _, m in sent if isinstance(m, KVHandoff)][-1] is True
    assert [end for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == []


def test_without_chunks_an_answer_that_goes_on_is_cut_all_the_same() -> None:
    """Eight tokens a step: a prompt of nine is refused, known tokens of eight and one delivered are not."""
    world = PrefillWorld(enable_chunked_prefill=False)
    world.generate(9)
    ((_, refused),) = [(end.kind, end.error) for end in world.ends()]
    assert "max_num_batched_tokens = 8" in refused
    world.generate(9, key=key("goes on"), offset=1)
    assert [world.step(), world.step()] == [{"goes on": 8}, {"goes on": 1}]


def test_what_the_prefix_cache_had_is_told_with_the_first_token_and_with_an_end_of_its_own() -> None:
    world = leased()
    release(world, "consumed")
    world.sent()
    world.generate(key=key("hit"), deadline_s=3.0)
    world.step()
    world.generate(12, key=key("late"), request_number=8, deadline_s=3.0)
    world.service.schedule()
    told = [stage for _, m in world.sent(StepTokens) for stage in m.stages]
    assert [(stage.request_number, stage.num_cached_tokens) for stage in told] == [(7, 8)]
    world.pass_time(3.0)
    told = [stage for _, m in world.sent(StepTokens) for stage in m.stages]
    assert [(stage.request_number, stage.num_cached_tokens) for stage in told] == [(8, 8)]
    assert (world.service.counters["cached_tokens"], world.service.counters["prefix_query_tokens"]) == (
        16,
        10 + 10 + 12,
    )


def test_later_attempts_count_apart_in_the_prefix_cache() -> None:
    world = leased()
    release(world, "consumed")
    world.generate(key=key(attempt=2))
    world.step()
    counters = world.service.counters
    assert (counters["cached_tokens"], counters["prefix_query_tokens"]) == (0, 10)
    assert (counters["redispatched_cached_tokens"], counters["redispatched_query_tokens"]) == (8, 10)


def test_an_abort_during_a_step_frees_the_blocks_when_the_step_is_done() -> None:
    world = PrefillWorld()
    world.generate()
    batch = world.service.schedule()
    assert batch is not None
    world.say(ROUTER, AbortRequest(key=key(), reason="client"))
    assert world.num_free() == 13 and not world.service.idle
    world.service.commit(world.runner.execute(batch))
    assert world.num_free() == 16 and world.service.idle and world.sent() == []


def test_a_failed_step_fails_its_requests_alone() -> None:
    world = PrefillWorld(max_num_batched_tokens=16)
    world.generate()
    world.generate(num_prompt=3, name="other", request_number=8)
    assert world.service.schedule() is not None
    world.generate(num_prompt=3, name="waits", request_number=9)
    world.service.step_failed("out of memory")
    assert [(end.request_number, end.kind, end.error) for end in world.ends()] == [
        (7, "failed", "out of memory"),
        (8, "failed", "out of memory"),
    ]
    assert world.step() == {"waits": 3}


def test_what_cannot_be_served_is_failed_at_once() -> None:
    world = PrefillWorld(num_blocks=3)
    world.generate(num_prompt=20)
    assert [end.kind for end in world.ends()] == ["failed"]
    world.say(ROUTER, Drain(deadline_s=9.0))
    world.generate(name="late")
    assert [(end.kind, end.error) for end in world.ends()] == [("failed", "draining")]
    assert world.service.drained


def test_to_a_router_that_was_only_slow_every_end_is_told() -> None:
    world = leased()
    world.generate(name="waits", key=key("waits"), request_number=8)
    world.sent()
    world.pass_time(10.0)
    assert [(end.request_number, end.kind) for end in world.ends()] == [(7, "returned"), (8, "returned")]


def test_a_newer_router_ends_the_older_ones_keys_and_an_older_one_is_not_heard() -> None:
    world = leased()
    world.sent()
    world.hear_router(epoch=4)
    assert [type(m) for _, m in world.sent()] == [KVRevoke, Hello]
    world.say(ROUTER, world.request(role="prefill", peer=D, name="old router"))
    assert world.step() == {}
    assert world.service.counters["ignored"] == 1


def test_a_message_for_an_older_epoch_is_dropped() -> None:
    world = PrefillWorld()
    world.say(ROUTER, world.request(role="prefill", peer=D), receiver=P._replace(epoch=4))
    assert world.service.idle and world.service.counters["ignored"] == 1


def test_a_key_dispatched_twice_is_a_bug() -> None:
    world = PrefillWorld()
    world.generate()
    with pytest.raises(ProtocolError, match="twice"):
        world.generate()


def test_status_every_second() -> None:
    world = leased()
    world.sent()
    world.pass_time(1.0)
    ((to, status),) = world.sent(ReplicaStatus)
    assert to == ROUTER and (status.num_leases, status.num_free_blocks, status.num_scheduled_tokens) == (
        1,
        13,
        ({"r": 8}, {"r": 2}),
    )
    world.pass_time(0.5)
    assert world.sent(ReplicaStatus) == []


def test_prompts_that_share_a_prefix_are_leased_apart() -> None:
    world = PrefillWorld(max_num_batched_tokens=32)
    world.generate()
    world.step()
    world.generate(num_prompt=12, name="same", request_number=8)
    world.step()
    handoffs = [m for _, m in world.sent(KVHandoff)]
    assert handoffs[0].block_ids[:2] == handoffs[1].block_ids[:2]
    world.say(D, KVRelease(key=key(), lease_id=handoffs[0].lease_id, outcome="consumed"))
    assert world.scheduler.blocks.all_owned(list(handoffs[1].block_ids))
    world.say(D, KVRelease(key=key("same"), lease_id=handoffs[1].lease_id, outcome="consumed"))
    assert world.service.idle and world.num_free() == 16
    world.service.check_idle()


def test_a_request_without_a_decode_peer_is_a_bug() -> None:
    world = PrefillWorld()
    message = world.request(role="prefill", peer=None)
    assert isinstance(message, EngineRequest)
    world.say(ROUTER, message)
    with pytest.raises(ProtocolError, match="names no decode peer"):
        world.step()


@pytest.mark.parametrize(("aging_s", "first"), [(10.0, "old"), (20.0, "urgent"), (0.0, "urgent")])
def test_waiting_for_seconds_makes_urgent(aging_s: float, first: str) -> None:
    """Three units of priority, 31 seconds."""
    world = PrefillWorld(
        scheduling_policy="priority", priority_aging_s=aging_s, max_num_batched_tokens=4, max_num_seqs=1
    )
    for request_number, (name, priority) in enumerate((("old", 3), ("urgent", 0))):
        world.clock.advance_to(31.0 * request_number)
        world.generate(4, name=name, request_number=request_number, priority=priority)
    assert world.step() == {first: 4}
