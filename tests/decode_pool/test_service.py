"""D's table, row by row: one service under test, and everybody else played by hand.

The file is longer than 300 lines because it follows that one table.
"""

from collections.abc import Callable

import pytest

from engine.runner import Batch
from engine.runners.arithmetic_model import expected_tokens
from kv_transfer.state import DECODE_TIMERS, DecodeState
from protocol.messages import (
    AbortRequest,
    Drain,
    Hello,
    KVRelease,
    KVRenew,
    KVRevoke,
    PeerDown,
    PeerUp,
    ReplicaStatus,
    StepTokens,
)
from tests.pool_world import ROUTER, D, DecodeWorld, P, key

ANSWER = expected_tokens(range(1, 11), 4)


def reserved(world: DecodeWorld | None = None, ready: int = 8) -> DecodeWorld:
    """Owns its destination; a pull of the first `ready` tokens is under way."""
    world = world or DecodeWorld()
    world.generate()
    world.handoff(ready=ready, first_token_id=ANSWER[0])
    assert world.step() == {} and len(world.network.pulls) == 1
    return world


def releases(world: DecodeWorld) -> list[str]:
    return [message.outcome for to, message in world.sent(KVRelease) if to == P]


def test_a_handed_off_request_decodes_what_prefill_began() -> None:
    world = DecodeWorld()
    world.generate()
    assert world.step() == {}
    world.handoff(ready=8)
    assert world.step() == {}
    world.handoff(first_token_id=ANSWER[0])
    world.finish_pulls()
    assert len(world.network.pulls) == 1  # the last, partial block
    world.finish_pulls()
    ((to, release),) = world.sent(KVRelease)
    assert to == P and (release.outcome, release.lease_id, release.num_bytes) == ("consumed", 9, 3 * 32)
    assert [world.step() for _ in range(4)] == [{"r": 1}, {"r": 1}, {"r": 1}, {}]
    rows = [message for _, message in world.sent(StepTokens)]
    assert [(m.offsets.tolist(), m.token_ids.tolist()) for m in rows] == [
        ([0], ANSWER[:2]),
        ([2], [ANSWER[2]]),
        ([3], [ANSWER[3]]),
    ]
    assert rows[-1].ends[0].finish_reason == "length"
    assert {"transfer", "decode_queue", "first_step", "decode"} <= set(rows[-1].stages[0].seconds)
    assert world.service.idle
    world.service.check_idle()


def test_a_handoff_may_come_before_its_request() -> None:
    world = DecodeWorld()
    world.handoff(ready=8)
    assert world.scheduler.num_free_blocks == 16
    reserved(world)


def test_nothing_is_reserved_before_the_first_handoff_and_then_all_at_once() -> None:
    world = DecodeWorld()
    world.generate(num_prompt=12)  # 12 + the slot of the next token: 4 blocks
    world.step()
    assert world.scheduler.num_free_blocks == 16
    world.handoff(num_prompt=12, ready=4)
    world.step()
    assert world.scheduler.num_free_blocks == 12


def test_a_lost_lease_fails_the_attempt_and_its_blocks_are_not_cached() -> None:
    world = reserved()
    world.words[2] = 0
    world.finish_pulls()
    sent = world.sent()
    assert [m.outcome for _, m in sent if isinstance(m, KVRelease)] == ["refused"]
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == ["failed"]
    assert world.service.idle and world.scheduler.blocks.visible() == {}
    assert world.service.counters["leases_lost"] == 1


def test_verified_chunks_stay_cached_when_a_later_pull_fails() -> None:
    world = reserved()
    world.finish_pulls()
    assert len(world.scheduler.blocks.visible()) == 2
    world.handoff(first_token_id=ANSWER[0])
    world.network.pulls[0].fail("cut")
    world.service.tick()
    assert [(end.kind, end.error) for end in world.ends()] == [("failed", "cut")]
    assert len(world.scheduler.blocks.visible()) == 2 and world.service.idle


def test_own_prefix_hits_are_not_pulled() -> None:
    world = reserved(ready=10)
    world.finish_pulls()
    while world.step():
        pass
    world.sent()
    world.generate(name="again", request_number=8)
    world.handoff(name="again", first_token_id=ANSWER[0])
    world.step()
    (pull,) = world.network.pulls
    assert pull.num_blocks == 1
    world.finish_pulls()
    world.step()
    release = next(m for _, m in world.sent(KVRelease))
    assert (release.outcome, release.num_bytes) == ("consumed", 32)


def end_it(world: DecodeWorld, cause: str) -> None:
    acts: dict[str, Callable[[], object]] = {
        "abort": lambda: world.say(ROUTER, AbortRequest(key=key(), reason="client")),
        "deadline": lambda: world.pass_time(3.0),
        "drain": lambda: world.drain(1.0),
        "router gone": lambda: world.pass_time(10.0),
        "revoke": lambda: world.say(P, KVRevoke(key=key(), lease_id=9, reason="client")),
    }
    acts[cause]()


CAUSES = {"abort": [], "deadline": ["aborted"], "drain": ["returned"], "router gone": ["returned"], "revoke": []}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", ["waiting", "reserved", "pulling"])
def test_what_ends_a_request_before_it_runs(cause: str, state: str) -> None:
    world = DecodeWorld(num_blocks=9)
    if state == "waiting":
        world.generate(num_prompt=20, name="first", request_number=1)  # takes what is free
        world.handoff(num_prompt=20, ready=4, name="first")
        world.step()
    world.generate(deadline_s=3.0 if cause == "deadline" else None)
    world.handoff(ready=8)
    world.step()
    if state == "waiting":
        world.say(ROUTER, AbortRequest(key=key("first"), reason="client"))
        world.finish_pulls()
    elif state == "reserved":
        world.finish_pulls()
    world.sent()
    end_it(world, cause)
    assert [end.kind for end in world.ends()] == CAUSES[cause] or state == "pulling"
    if state == "pulling":  # the destination stays reserved until the pull is terminal
        assert world.scheduler.num_free_blocks == 5 and not world.service.idle
        world.sent()
        world.finish_pulls()
        assert releases(world) == ["refused"]
    assert world.service.idle and world.scheduler.num_free_blocks == 8
    world.service.check_idle()


def test_a_pull_that_ends_after_its_request_is_neither_verified_nor_cached() -> None:
    world = reserved()
    world.say(ROUTER, AbortRequest(key=key(), reason="client"))
    world.say(
        P, KVRevoke(key=key(), lease_id=9, reason="client")
    )  # ignored: the one answer comes when the pull has ended
    assert releases(world) == []
    world.finish_pulls()
    assert releases(world) == ["refused"]
    assert world.scheduler.blocks.visible() == {} and world.service.idle


@pytest.mark.parametrize("cause", ["abort", "deadline", "drain", "router gone"])
def test_what_ends_a_running_request(cause: str) -> None:
    world = reserved(ready=10)
    if cause == "deadline":
        world = reserved_with_deadline()
    world.finish_pulls()
    world.step()
    world.sent()
    end_it(world, cause)
    sent = world.sent()
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == CAUSES[cause]
    assert [m for _, m in sent if isinstance(m, KVRelease)] == []  # consumed was sent
    assert world.service.idle


def reserved_with_deadline() -> DecodeWorld:
    world = DecodeWorld()
    world.generate(deadline_s=3.0)
    world.handoff(first_token_id=ANSWER[0])
    world.step()
    return world


def test_a_running_request_ignores_a_revoke() -> None:
    world = reserved(ready=10)
    world.finish_pulls()
    world.sent()
    world.say(P, KVRevoke(key=key(), lease_id=9, reason="late"))
    assert world.sent() == [] and world.step() == {"r": 1}


def test_a_revoke_for_nobody_is_answered() -> None:
    world = DecodeWorld()
    world.say(P, KVRevoke(key=key(), lease_id=9, reason="x"))
    assert releases(world) == ["refused"]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_pull_that_stalls_is_asked_to_end_whatever_became_of_its_request(cause: str) -> None:
    """Its blocks stay its own until it has ended; a transport that does not listen at once is asked again."""
    world = DecodeWorld()
    world.generate(deadline_s=3.0 if cause == "deadline" else None)
    world.handoff(ready=8)
    world.step()
    (pull,) = world.network.pulls
    end_it(world, cause)
    world.hear_router()
    for _ in range(2):
        pull.cancelled = False
        world.pass_time(30.0)
        assert pull.cancelled and world.scheduler.num_free_blocks == 13
    world.finish_pulls()
    assert world.service.idle
    world.service.check_idle()


def test_every_state_that_a_pull_may_write_in_has_its_timer() -> None:
    assert {state for state, timers in DECODE_TIMERS.items() if "pull" in timers} == {
        DecodeState.RESERVED,
        DecodeState.DRAINING,
    }


def test_a_refusal_without_a_request_leaves_the_telling_to_the_prefill_engine() -> None:
    world = DecodeWorld(max_early_handoffs=1)
    world.handoff(name="a")
    world.handoff(name="b")
    ((_, refused),) = world.sent(KVRelease)
    assert (refused.key.request_id, refused.outcome, refused.router_knows) == ("b", "refused", False)
    world.say(ROUTER, Drain(deadline_s=1.0))
    world.pass_time(1.0)
    ((_, refused),) = world.sent(KVRelease)
    assert (refused.key.request_id, refused.outcome, refused.router_knows) == ("a", "refused", False)


def test_a_refusal_with_a_request_has_been_told() -> None:
    world = reserved()
    world.network.pulls[0].fail("cut")
    world.service.tick()
    sent = world.sent()
    assert [m.router_knows for _, m in sent if isinstance(m, KVRelease)] == [True]
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == ["failed"]


def test_early_handoffs_are_bounded_and_forgotten_silently() -> None:
    world = DecodeWorld(max_early_handoffs=1)
    world.handoff(name="a")
    world.handoff(name="b")
    assert releases(world) == ["refused"]
    for _ in range(4):
        world.pass_time(7.5)
        world.hear_router()
    assert world.service.idle and releases(world) == []


def test_early_handoff_and_revoke() -> None:
    world = DecodeWorld()
    world.handoff()
    world.say(P, KVRevoke(key=key(), lease_id=9, reason="x"))
    assert releases(world) == ["refused"] and world.service.idle


def test_handoffs_of_stale_epochs_are_refused() -> None:
    world = DecodeWorld()
    world.handoff(key=key(router_epoch=2))
    assert releases(world) == ["refused"] and world.service.idle


def test_a_handoff_of_a_newer_router_ends_the_older_ones_keys() -> None:
    world = reserved(ready=10)
    world.finish_pulls()
    world.sent()
    world.handoff(name="new", key=key("new", router_epoch=4))
    assert [type(m) for to, m in world.sent() if to.replica_id == "router"] == [Hello]
    assert world.step() == {} and not world.service.idle


def test_to_a_newer_router_nothing_is_said_of_the_older_ones_keys() -> None:
    world = reserved(ready=10)
    world.finish_pulls()
    world.sent()
    world.hear_router(4)
    assert [type(m) for to, m in world.sent() if to.replica_id == "router"] == [Hello]
    assert world.service.idle


def test_unequal_layouts_never_pair() -> None:
    world = DecodeWorld()
    world.generate()
    world.handoff(layout_fingerprint=b"other")
    sent = world.sent()
    assert [m.outcome for _, m in sent if isinstance(m, KVRelease)] == ["refused"]
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == ["failed"]


def test_held_handoffs_are_renewed_in_one_message_a_peer() -> None:
    world = DecodeWorld()
    for name in ("a", "b"):
        world.generate(name=name)
        world.handoff(name=name, ready=8)
    world.step()
    world.finish_pulls()
    world.sent()
    world.pass_time(9.9)
    assert world.sent(KVRenew) == []
    world.hear_router()
    world.pass_time(0.2)
    ((to, renewal),) = world.sent(KVRenew)
    assert to == P and [name.request_id for name, _ in renewal.leases] == ["a", "b"]


def test_a_pull_that_takes_too_long_is_cancelled_and_its_destination_waits_for_it() -> None:
    world = reserved()
    for _ in range(4):
        world.pass_time(7.5)
        world.hear_router()
    assert world.scheduler.num_free_blocks == 13 and world.ends() == []
    world.finish_pulls()
    assert [(end.kind, end.error) for end in world.ends()] == [("failed", "cancelled")]
    assert world.service.idle


def test_a_peer_that_cannot_be_opened_fails_attempts_and_nothing_else() -> None:
    world = DecodeWorld()
    world.say(ROUTER, PeerUp(peer=P, endpoint=b"gone"))
    world.finish_connections()
    world.generate()
    world.handoff()
    world.step()
    assert [end.kind for end in world.ends()] == ["failed"] and world.service.idle


def test_the_memory_of_a_dead_peer_is_let_go_of_when_its_last_pull_has_ended() -> None:
    world = reserved()
    (pull,) = world.network.pulls
    world.say(ROUTER, PeerDown(peer=P))
    assert pull.cancelled and world.network.is_mapped(b"p"), "a pull may still read from it"
    world.finish_pulls()
    assert not world.network.is_mapped(b"p")
    assert [(end.kind, end.error) for end in world.ends()] == [("failed", "cancelled")]
    world.say(ROUTER, PeerDown(peer=P))  # and a second time nothing happens
    assert world.service.idle


def test_a_new_router_tells_anew_of_the_peers_that_live() -> None:
    world = DecodeWorld()
    assert world.network.is_mapped(b"p")
    world.hear_router(ROUTER.epoch + 1)
    assert not world.network.is_mapped(b"p"), "it may have died while there was no router"
    world.say(ROUTER._replace(epoch=ROUTER.epoch + 1), PeerUp(peer=P, endpoint=b"p"))
    assert world.network.is_mapped(b"p")


def test_alone_it_prefills_by_the_same_pass() -> None:
    world = DecodeWorld()
    world.say(ROUTER, world.request(role="colocated", peer=None))
    assert [world.step() for _ in range(6)] == [{"r": 8}, {"r": 2}, {"r": 1}, {"r": 1}, {"r": 1}, {}]
    tokens = [token for _, m in world.sent(StepTokens) for token in m.token_ids.tolist()]
    assert tokens == ANSWER and world.service.idle


def test_what_cannot_be_served_is_failed_at_once() -> None:
    world = DecodeWorld(num_blocks=3)
    world.generate(num_prompt=20)
    assert [end.kind for end in world.ends()] == ["failed"]
    world.say(ROUTER, Drain(deadline_s=9.0))
    world.generate(name="late")
    assert [end.error for end in world.ends()] == ["draining"]


def test_a_failed_step_fails_its_requests_alone() -> None:
    world = DecodeWorld(max_num_batched_tokens=10)
    world.say(ROUTER, world.request(role="colocated", peer=None))
    assert world.service.schedule() is not None
    world.say(ROUTER, world.request(role="colocated", peer=None, name="other", request_number=8))
    world.service.step_failed("boom")
    assert [(end.request_number, end.kind, end.error) for end in world.ends()] == [(7, "failed", "boom")]
    assert world.scheduler.blocks.visible() == {}
    assert world.step() == {"other": 10}


def found_in_flight(ready: int) -> tuple[DecodeWorld, Batch]:
    """`first` computes a prompt, 8 tokens in a step that is in flight; `r` has the same one and reserved those two
    blocks already.
    """
    world = DecodeWorld()
    world.say(ROUTER, world.request(role="colocated", peer=None, name="first", request_number=8))
    assert world.service.schedule() is not None
    world.generate()
    world.handoff(ready=ready, first_token_id=ANSWER[0])
    batch = world.service.schedule()
    assert batch is not None and batch.num_scheduled_tokens() == {"first": 2}
    return world, batch


@pytest.mark.parametrize("ready", [8, 10], ids=["nothing to pull", "a pull under way"])
def test_a_failed_step_fails_who_reserved_the_blocks_that_it_was_to_fill(ready: int) -> None:
    world, batch = found_in_flight(ready)
    num_pulls = len(world.network.pulls)
    assert num_pulls == (ready == 10)
    world.service.step_failed("boom")
    assert sorted((end.request_number, end.kind, end.error) for end in world.ends()) == [
        (7, "failed", "boom"),
        (8, "failed", "boom"),
    ]
    assert (len(world.service.keys()), world.scheduler.blocks.visible()) == (num_pulls, {})
    world.service.commit(world.runner.execute(batch))
    world.finish_pulls()
    assert world.service.idle
    world.service.check_idle()


def test_the_lease_of_who_failed_with_another_ones_step_is_refused() -> None:
    world, _ = found_in_flight(10)
    world.service.step_failed("boom")
    assert releases(world) == []  # the pull still reads under it
    world.finish_pulls()
    assert releases(world) == ["refused"]


def test_who_had_ended_does_not_fail_again_with_a_step() -> None:
    world, _ = found_in_flight(10)
    world.say(ROUTER, AbortRequest(key=key(), reason="client"))
    world.service.step_failed("boom")
    assert [end.request_number for end in world.ends()] == [8]
    world.finish_pulls()
    assert releases(world) == ["refused"]


def test_status_counts_pulls_and_early_handoffs() -> None:
    world = reserved()
    world.handoff(name="early")
    world.pass_time(1.0)
    ((to, status),) = world.sent(ReplicaStatus)
    assert to == ROUTER and (status.num_pulls, status.num_early_handoffs, status.state) == (1, 1, "up")


def test_an_older_router_is_not_heard() -> None:
    world = DecodeWorld()
    world.say(ROUTER._replace(epoch=2), world.request(role="colocated", peer=None))
    world.say(ROUTER, world.request(role="colocated", peer=None), receiver=D._replace(epoch=5))
    assert world.service.idle and world.service.counters["ignored"] == 2


@pytest.mark.parametrize(("aging_s", "first"), [(10.0, "old"), (20.0, "urgent"), (0.0, "urgent")])
def test_waiting_for_seconds_makes_urgent(aging_s: float, first: str) -> None:
    """Three units of priority, 31 seconds."""
    world = DecodeWorld(
        scheduling_policy="priority", priority_aging_s=aging_s, max_num_batched_tokens=4, max_num_seqs=1
    )
    for request_number, (name, priority) in enumerate((("old", 3), ("urgent", 0))):
        world.clock.advance_to(31.0 * request_number)
        world.say(
            ROUTER,
            world.request(4, name=name, request_number=request_number, priority=priority, role="colocated", peer=None),
        )
    assert world.step() == {first: 4}
