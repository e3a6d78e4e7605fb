"""R's table row by row, without engines: messages go in by hand, outbox and client events come out."""

import pytest

from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ProtocolError,
    RequestCancelled,
    RequestFailed,
)
from protocol.grammar import Grammar
from protocol.messages import (
    AbortRequest,
    Address,
    EngineRequest,
    PeerDown,
    PeerGap,
    PeerUp,
    RouterStatus,
    SamplingParams,
    StageSeconds,
)
from tests.router.router_world import D, P, World, status


def test_engines_are_introduced_whichever_starts_first() -> None:
    world = World()
    world.hello(Address("decode-1", 7), "decode")
    assert (Address("decode-1", 7), PeerUp(peer=P, endpoint=b"at prefill-0")) in world.sent(PeerUp)
    world.hello(Address("prefill-1", 8), "prefill")
    assert {to for to, _ in world.sent(PeerUp)} == {D, Address("decode-1", 7)}


def test_decode_engines_hear_of_a_prefill_engines_death_and_of_no_other() -> None:
    world = World()
    world.hello(Address("decode-1", 7), "decode")
    world.sent()
    world.router.replica_down(Address("decode-1", 7))
    assert world.sent(PeerDown) == []
    world.router.replica_down(P)
    assert world.sent(PeerDown) == [(D, PeerDown(peer=P))]
    world.router.replica_down(P)
    assert world.sent(PeerDown) == []


def test_a_pair_gets_the_request_and_both_counters_rise() -> None:
    world = World()
    world.submit()
    (to_decode, decode), (to_prefill, prefill) = world.sent(EngineRequest)
    assert (to_decode, decode.role, decode.peer) == (D, "decode", P)
    assert (to_prefill, prefill.role, prefill.peer) == (P, "prefill", D)
    assert decode.key == prefill.key == (3, "r", 1)
    assert decode.sampling.seed == prefill.sampling.seed is not None
    assert world.in_flight() == {"prefill-0": 1, "decode-0": 1}


def test_both_engines_bring_the_first_token_and_the_client_gets_it_once() -> None:
    world = World()
    world.submit()
    world.tokens(P, 0, [40])
    world.tokens(D, 0, [40, 41])
    assert world.in_flight() == {"prefill-0": 0, "decode-0": 1}
    world.tokens(D, 2, [42], ("finished", "stop"), stages=(StageSeconds(0, 1, {"decode": 0.5}, 2),))
    assert world.received() == [40, 41, 42]
    ended = world.ended()
    assert (ended.finish_reason, ended.error, ended.usage) == ("stop", None, (3, 2, 3))
    assert world.in_flight() == {"prefill-0": 0, "decode-0": 0}


def test_decode_may_overtake_prefill() -> None:
    world = World()
    world.submit()
    world.tokens(D, 0, [40, 41])
    world.tokens(P, 0, [40])
    assert world.received() == [40, 41]


def test_an_answer_that_ends_at_prefill_aborts_decode() -> None:
    world = World()
    world.submit()
    world.sent()
    world.tokens(P, 0, [40], ("finished", "stop"))
    assert [(to, message.reason) for to, message in world.sent(AbortRequest)] == [(D, "superseded")]
    assert world.ended().finish_reason == "stop" and not any(world.in_flight().values())


def test_a_gap_in_the_answer_is_a_bug() -> None:
    world = World()
    world.submit()
    with pytest.raises(ProtocolError, match="start at 2"):
        world.tokens(D, 2, [42])


def test_an_answer_that_cannot_go_on_under_its_grammar_is_tried_nowhere_else() -> None:
    world = World()
    world.submit(sampling=SamplingParams(grammar=Grammar("regex", "a+")))
    world.sent()
    world.tokens(P, 0, [1])
    world.tokens(D, 1, [2], end=("invalid", None, "too many states"))
    error = world.ended().error
    assert isinstance(error, InvalidRequest) and str(error) == "grammar: regex is not allowed: too many states"
    assert [(to, message.reason) for to, message in world.sent(AbortRequest)] == [(P, "superseded")]
    assert world.router.counters["retries"] == 0


def test_a_failed_attempt_goes_on_from_what_was_delivered() -> None:
    world = World()
    world.submit()
    world.tokens(D, 0, [40, 41])
    world.sent()
    world.tokens(D, 2, [], ("failed", None, "boom"))
    sent = world.sent()
    assert (P, "superseded") in [(to, m.reason) for to, m in sent if isinstance(m, AbortRequest)]
    retry = next(m for to, m in sent if isinstance(m, EngineRequest) and to == D)
    assert (retry.key.attempt, retry.offset, retry.max_tokens) == (2, 2, 3)
    assert retry.prompt_token_ids.tolist() == [7, 8, 9, 40, 41]
    world.tokens(D, 0, [40, 41, 42], attempt=1)  # too late: the first attempt no longer counts
    world.tokens(D, 2, [42], ("finished", "length"), attempt=2)
    assert world.received() == [40, 41, 42] and world.ended().attempts == 2


def test_cached_tokens_are_those_of_the_first_attempt_that_tells() -> None:
    """Zero counts as told. What a later attempt finds of delivered tokens is the request's own work."""
    world = World(max_attempts=9)
    world.submit()
    world.tokens(P, 0, [1], stages=(StageSeconds(0, 1, {}, 0),))
    world.tokens(D, 0, [1, 2], stages=(StageSeconds(0, 1, {}),), end=("returned",))
    world.tokens(P, 2, [3], attempt=2, stages=(StageSeconds(0, 2, {}, 4),))
    world.tokens(D, 3, [4, 5], attempt=2, end=("finished", "length"))
    assert world.ended().usage == (3, 0, 5)


def test_cached_tokens_that_were_never_told_of_the_prompt_alone_are_none() -> None:
    """Decode overtakes prefill and fails, so no engine tells any more what the first attempt found in a cache."""
    world = World()
    world.submit()
    world.tokens(D, 0, [1, 2], end=("failed", None, "x"))
    world.tokens(P, 2, [3], attempt=2, stages=(StageSeconds(0, 2, {}, 4),))
    world.tokens(D, 3, [4, 5], attempt=2, end=("finished", "length"))
    assert world.ended().usage.cached_tokens == 0


def test_a_first_attempt_that_fails_after_it_told_stands() -> None:
    world = World()
    world.submit()
    world.tokens(P, 0, [], stages=(StageSeconds(0, 1, {}, 2),), end=("failed", None, "x"))
    world.tokens(P, 0, [1], attempt=2, stages=(StageSeconds(0, 2, {}, 0),))
    world.tokens(D, 1, [2, 3, 4, 5], attempt=2, end=("finished", "length"))
    assert world.ended().usage.cached_tokens == 2


def test_max_attempts_failures_end_a_request_and_returned_ones_do_not_count() -> None:
    world = World(max_attempts=2)
    world.submit()
    world.tokens(D, 0, [], ("returned", None, "drained"), attempt=1)
    world.tokens(P, 0, [], ("failed", None, "lease_expired"), attempt=2)
    world.tokens(P, 0, [], ("failed", None, "lease_expired"), attempt=3)
    error = world.ended().error
    assert isinstance(error, RequestFailed) and "lease_expired" in str(error) and "max_attempts is 2" in str(error)
    assert not any(world.in_flight().values())


@pytest.mark.parametrize("decode_seen", [False, True])
def test_prefill_down(decode_seen: bool) -> None:
    world = World()
    world.submit()
    if decode_seen:
        world.tokens(D, 0, [40, 41])
    world.sent()
    world.router.replica_down(P)
    aborts = [(to, m.reason) for to, m in world.sent(AbortRequest)]
    assert aborts == ([] if decode_seen else [(D, "superseded")])
    world.tokens(D, 2 if decode_seen else 0, [42], ("finished", "stop"), attempt=1 if decode_seen else 2)
    assert world.ended().error is None and world.in_flight() == {"decode-0": 0}


def test_decode_down_tells_prefill_that_its_peer_is_lost() -> None:
    world = World()
    world.submit()
    world.tokens(D, 0, [40, 41])
    world.sent()
    world.router.replica_down(D)
    assert [(to, m.reason) for to, m in world.sent()] == [(P, "peer_lost")]
    world.hello(Address("decode-0", 9), "decode")
    retry = next(m for to, m in world.sent(EngineRequest) if to == Address("decode-0", 9))
    assert retry.offset == 2
    world.tokens(D, 2, [66], attempt=1)  # from the dead epoch
    assert world.received() == [40, 41]


def test_a_silent_engine_is_suspected_told_and_comes_back_when_it_speaks() -> None:
    world = World(prefill=False)
    world.submit()
    world.sent()
    world.clock.advance_to(5.0)
    world.router.tick()
    assert [(to, m.reason) for to, m in world.sent(AbortRequest)] == [(D, "superseded")]
    assert not world.router.ready and world.in_flight() == {"decode-0": 0}
    world.say(D, status(num_free_blocks=9))
    assert world.router.ready
    assert [m.key.attempt for _, m in world.sent(EngineRequest)] == [2]


def test_a_gap_means_down_and_the_supervisor_is_told() -> None:
    world = World()
    world.submit()
    world.sent()
    world.say(D, PeerGap(peer=P))
    assert world.router.lost == [P]
    assert {(to, m.reason) for to, m in world.sent(AbortRequest)} == {(D, "superseded"), (P, "superseded")}
    world.tokens(P, 0, [40], attempt=2)
    assert world.received() == []


def test_cancel_deadline_and_stop_end_it_everywhere() -> None:
    for act, kind, reason in [
        ("cancel", RequestCancelled, "client"),
        ("deadline", DeadlineExceeded, "deadline"),
        ("stop", None, "superseded"),
    ]:
        world = World()
        world.submit(deadline_s=2.0)
        world.sent()
        if act == "deadline":
            world.clock.advance_to(2.0)
            world.router.tick()
        else:
            getattr(world.router, act)("r")
        assert {(to, m.reason) for to, m in world.sent(AbortRequest)} == {(P, reason), (D, reason)}
        ended = world.ended()
        assert (type(ended.error) if kind else ended.finish_reason) == (kind or "stop")
        world.router.cancel("r")
        world.tokens(D, 0, [1], ("finished", "stop"))
        assert world.ended() is ended and not any(world.in_flight().values())


def test_drain_ends_what_is_open_at_the_deadline() -> None:
    world = World()
    world.submit()
    world.router.drain(5.0)
    assert not world.router.drained
    world.clock.advance_to(5.0)
    world.router.tick()
    assert world.router.drained and isinstance(world.ended().error, Draining)
    assert world.router.num_cut_short == 1


def test_status_goes_out_every_second_with_the_largest_room() -> None:
    world = World()
    world.clock.advance_to(1.0)
    world.router.tick()
    statuses = world.sent(RouterStatus)
    assert {to for to, _ in statuses} == {P, D}
    world.router.tick()
    assert world.sent(RouterStatus) == []


def test_stage_times_sum_to_the_time_in_the_router() -> None:
    world = World()
    world.submit()
    world.clock.advance_to(1.0)
    world.tokens(P, 0, [40], stages=(StageSeconds(0, 1, {"prefill_queue": 0.2, "prefill": 0.7}),))
    world.clock.advance_to(3.0)
    world.tokens(D, 0, [40, 41], ("finished", "length"), stages=(StageSeconds(0, 1, {"transfer": 0.3, "decode": 1.6}),))
    stages = world.ended().stages
    assert sum(stages.values()) == pytest.approx(3.0)
    assert stages["messages"] == pytest.approx(0.2)
