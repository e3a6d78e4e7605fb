"""R's table, row by row, without engines: what goes in by hand, what comes out in the outbox and the client events."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from protocol.clock import VirtualClock
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestFailed,
)
from protocol.messages import (
    AbortRequest,
    Address,
    End,
    EngineRequest,
    Envelope,
    Hello,
    PeerDown,
    PeerGap,
    PeerUp,
    ReplicaStatus,
    RouterStatus,
    SamplingParams,
    StageSeconds,
    StepTokens,
)
from router.admission import ClientRequest
from router.config import RouterConfig
from router.request import Delivered, Ended
from router.router import Router

P, D = Address("prefill-0", 5), Address("decode-0", 6)


def status(num_free_blocks: int) -> ReplicaStatus:
    counts: dict[str, Any] = {
        "num_waiting": 0,
        "num_running": 0,
        "num_leases": 0,
        "num_pulls": 0,
        "num_early_handoffs": 0,
    }
    return ReplicaStatus(state="up", seq=1, num_free_blocks=num_free_blocks, **counts)


class World:
    """A router with one prefill and one decode engine that exist only as addresses."""

    def __init__(self, *, prefill: bool = True, **config: Any) -> None:
        self.clock = VirtualClock()
        self.router = Router(RouterConfig(**config), address=Address("router", 3), clock=self.clock, seed=1)
        if prefill:
            self.hello(P, "prefill")
        self.hello(D, "decode")
        self.sent()

    def hello(self, address: Address, role: Any, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 100,
            "max_num_seqs": 2,
            "max_model_len": 64,
            "max_prompt_tokens": 63,
        }
        self.router.replica_started(address)
        self.say(
            address,
            Hello(
                role=role, layout_fingerprint=b"l", endpoint=b"at " + address.replica_id.encode(), **(fields | changes)
            ),
        )

    def say(self, sender: Address, message: Any) -> None:
        self.router.handle(Envelope(sender, self.router.address, 0, message))

    def submit(self, name: str = "r", **changes: Any) -> None:
        fields: dict[str, Any] = {
            "max_tokens": 5,
            "sampling": SamplingParams(),
            "prompt_token_ids": np.array([7, 8, 9], np.int32),
        }
        self.router.submit(ClientRequest(request_id=name, **(fields | changes)))

    def tokens(
        self,
        sender: Address,
        offset: int,
        token_ids: list[int],
        end: Any = None,
        *,
        attempt: int = 1,
        request_number: int = 0,
        **more: Any,
    ) -> None:
        ends = (End(request_number, attempt, *end),) if end else ()
        one = [request_number] if token_ids else []
        self.say(
            sender,
            StepTokens(
                router_epoch=3,
                request_numbers=np.array(one, np.int64),
                attempts=np.array([attempt] * len(one), np.int32),
                offsets=np.array([offset] * len(one), np.int32),
                counts=np.array([len(token_ids)] * len(one), np.int32),
                token_ids=np.array(token_ids, np.int32),
                ends=ends,
                **more,
            ),
        )

    def sent(self, kind: type | None = None) -> list[tuple[Address, Any]]:
        sent = [(to, message) for to, message in self.router.outbox if kind is None or isinstance(message, kind)]
        self.router.outbox.clear()
        return sent

    def received(self) -> list[int]:
        return [token for event in self.router.events if isinstance(event, Delivered) for token in event.token_ids]

    def ended(self) -> Ended:
        (ended,) = [event for event in self.router.events if isinstance(event, Ended)]
        return ended

    def in_flight(self) -> dict[str, int]:
        return {replica.address.replica_id: replica.in_flight for replica in self.router.replicas()}


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


def test_a_failed_attempt_goes_on_from_what_was_delivered() -> None:
    world = World()
    world.submit()
    world.tokens(D, 0, [40, 41])
    world.sent()
    world.tokens(D, 2, [], ("failed", None, "boom"))
    sent = world.sent()
    assert (P, "superseded") in [(to, m.reason) for to, m in sent if isinstance(m, AbortRequest)]
    retry = next(m for to, m in sent if isinstance(m, EngineRequest) and to == D)
    assert (retry.key.attempt, retry.prompt_token_ids.tolist(), retry.offset, retry.max_tokens) == (
        2,
        [7, 8, 9, 40, 41],
        2,
        3,
    )
    world.tokens(D, 0, [40, 41, 42], attempt=1)  # late: another key
    world.tokens(D, 2, [42], ("finished", "length"), attempt=2)
    assert world.received() == [40, 41, 42] and world.ended().attempts == 2


def test_cached_tokens_are_those_of_the_first_attempt_that_tells() -> None:
    """Zero is an answer; what an attempt finds of tokens that were delivered before is the request's own work."""
    world = World(max_attempts=9)
    world.submit()
    world.tokens(P, 0, [1], stages=(StageSeconds(0, 1, {}, 0),))
    world.tokens(D, 0, [1, 2], stages=(StageSeconds(0, 1, {}),), end=("returned",))
    world.tokens(P, 2, [3], attempt=2, stages=(StageSeconds(0, 2, {}, 4),))
    world.tokens(D, 3, [4, 5], attempt=2, end=("finished", "length"))
    assert world.ended().usage == (3, 0, 5)


def test_cached_tokens_that_were_never_told_of_the_prompt_alone_are_none() -> None:
    """Decode overtakes prefill, which dies: nobody tells any more what it had."""
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


# ---- limits of one engine, and promises of the deployment


def prompt(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def test_a_prompt_that_no_engine_computes_is_refused_with_the_limit() -> None:
    world = World(prefill=False)
    world.hello(Address("decode-0", 9), "decode", max_prompt_tokens=16)
    with pytest.raises(
        InvalidRequest,
        match="prompt: 17 tokens is not allowed: the longest prompt that an engine computes has 16 tokens",
    ):
        world.submit(prompt_token_ids=prompt(17))
    world.submit(prompt_token_ids=prompt(16))


def test_a_prompt_that_decode_alone_computes_goes_there() -> None:
    world = World(prefill=False)
    world.hello(P, "prefill", max_prompt_tokens=16)
    world.submit(prompt_token_ids=prompt(17))
    ((to, message),) = world.sent(EngineRequest)
    assert (to, message.role) == (D, "colocated")


def test_a_prompt_that_prefill_alone_computes_waits_for_it_and_lets_others_pass() -> None:
    world = World()
    world.hello(Address("decode-0", 9), "decode", max_prompt_tokens=16)
    world.submit("long", prompt_token_ids=prompt(17))
    assert {message.role for _, message in world.sent(EngineRequest)} == {"prefill", "decode"}
    world.router.replica_down(P)
    with pytest.raises(RequestFailed, match="no prefill engine that computes a prompt of 17 tokens is up"):
        world.submit("longer", prompt_token_ids=prompt(17))
    world.submit("short")
    ((_, message),) = world.sent(EngineRequest)
    assert (message.key.request_id, message.role, world.router.num_queued) == ("short", "colocated", 1)
    world.hello(Address("prefill-0", 10), "prefill")
    assert [message.key.request_id for _, message in world.sent(EngineRequest)] == ["long", "long"]


def test_an_answer_that_goes_on_is_not_a_prompt() -> None:
    """Its known tokens may outgrow what an engine takes as a prompt."""
    world = World(prefill=False)
    world.hello(Address("decode-0", 9), "decode", max_prompt_tokens=3)
    world.submit()
    world.sent()
    world.tokens(Address("decode-0", 9), 0, [1, 2], end=("returned",))
    ((_, message),) = world.sent(EngineRequest)
    assert (message.role, message.offset, len(message.prompt_token_ids)) == ("colocated", 2, 5)


def test_a_decode_engine_that_cannot_hold_the_whole_answer_does_not_get_it() -> None:
    world = World(prefill=False)
    world.submit(prompt_token_ids=prompt(40), max_tokens=20)
    world.sent()
    world.router.replica_down(D)
    world.hello(Address("decode-1", 9), "decode", num_blocks=14, max_prompt_tokens=52)
    assert world.sent(EngineRequest) == [] and world.router.num_queued == 1


def test_nothing_is_returned_to_a_prefill_pool_that_is_not_used() -> None:
    for mode, told in (("auto", (50, 63)), ("colocated", (0, 0))):
        world = World(disaggregation=mode)
        world.say(P, status(num_free_blocks=50))
        world.clock.advance_to(2.0)
        world.router.tick()
        assert {(m.prefill_room_blocks, m.prefill_max_tokens) for _, m in world.sent(RouterStatus)} == {told}


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
    world.tokens(D, 2, [66], attempt=1)  # of the dead epoch
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


def test_excess_waits_in_the_router_and_a_full_line_refuses() -> None:
    world = World(max_queue=3)
    for index in range(13):  # 2 seats + 8 ahead, 3 in the line
        world.submit(f"r{index}")
    assert world.in_flight()["decode-0"] == 10
    with pytest.raises(Overloaded):
        world.submit("one too many")
    world.router.cancel("r0")
    assert world.in_flight()["decode-0"] == 10
    world.submit("fits again")


def test_several_requests_are_accepted_together_or_none_is() -> None:
    """2 seats and 8 ahead in each engine of a pair, 3 in the line; whatever is wrong with one of them."""
    world = World(max_queue=3)

    def several(*changes: dict[str, Any]) -> list[ClientRequest]:
        fields: dict[str, Any] = {
            "prompt_token_ids": np.array([7, 8, 9], np.int32),
            "max_tokens": 5,
            "sampling": SamplingParams(),
        }
        return [
            ClientRequest(**{"request_id": f"r{index}", **fields, **change}) for index, change in enumerate(changes)
        ]

    for wrong, error in (
        ([{}] * 14, Overloaded),
        ([{}, {"max_tokens": 0}], InvalidRequest),
        ([{}, {"deadline_s": 0.0}], DeadlineExceeded),
    ):
        with pytest.raises(error):
            world.router.submit(*several(*wrong))
        assert world.sent() == [] and world.router.num_open == 0 and world.router.counters["accepted"] == 0
    world.router.submit(*several(*[{}] * 13))
    assert (world.in_flight(), world.router.num_queued) == ({"prefill-0": 10, "decode-0": 10}, 3)


def test_refusals_leave_nothing_behind() -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.submit(max_tokens=0)
    world.submit("same")
    with pytest.raises(InvalidRequest, match="already in use"):
        world.submit("same")
    assert world.router.num_open == 1
    world.router.drain(5.0)
    with pytest.raises(Draining):
        world.submit("late")


def test_drain_ends_what_is_open_at_the_deadline() -> None:
    world = World()
    world.submit()
    world.router.drain(5.0)
    assert not world.router.drained
    world.clock.advance_to(5.0)
    world.router.tick()
    assert world.router.drained and isinstance(world.ended().error, Draining)
    assert world.router.num_cut_short == 1


def test_without_an_engine_requests_are_refused_and_without_prefill_decode_serves_alone() -> None:
    router = Router(RouterConfig(), address=Address("router", 3), clock=VirtualClock(), seed=1)
    with pytest.raises(RequestFailed, match="no decode engine"):
        router.submit(
            ClientRequest(
                request_id="r", prompt_token_ids=np.array([1], np.int32), max_tokens=1, sampling=SamplingParams()
            )
        )
    world = World(prefill=False)
    world.submit()
    assert [(to, m.role, m.peer) for to, m in world.sent(EngineRequest)] == [(D, "colocated", None)]


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


def test_strict_disaggregation_refuses_what_would_fall_back() -> None:
    world = World(prefill=False, disaggregation="strict")
    with pytest.raises(RequestFailed, match="strict"):
        world.submit()
    world.hello(P, "prefill", num_blocks=3)
    with pytest.raises(InvalidRequest, match="prefill engines hold 8 tokens"):
        world.submit(max_tokens=7)
    world.submit("fits", max_tokens=6)
    assert {m.role for _, m in world.sent(EngineRequest)} == {"prefill", "decode"}


def test_what_says_that_it_is_ready_takes_requests_and_only_that() -> None:
    """Whatever may be up, suspected, draining or gone, under every kind of disaggregation."""

    def silence(world: World, address: Address) -> None:
        world.clock.advance_to(5.0)
        world.router.tick()

    gone: list[Callable[[World, Address], None]] = [
        lambda world, address: None,
        lambda world, address: world.router.replica_down(address),
        lambda world, address: world.router.replica_lost(address),
        lambda world, address: world.router.drain_replica(address, 5.0),
        lambda world, address: world.router.drain(5.0),
        silence,
    ]
    for disaggregation, prefill, loss, address in product(("auto", "strict", "colocated"), (True, False), gone, (P, D)):
        world = World(prefill=prefill, disaggregation=disaggregation)
        if address == D or prefill:
            loss(world, address)
        ready = world.router.ready
        try:
            world.submit()
        except (RequestFailed, Draining):
            assert not ready
        else:
            assert ready
