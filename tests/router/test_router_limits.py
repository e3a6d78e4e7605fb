"""Which requests the router accepts, refuses or lets wait, by what its engines can hold."""

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
    RequestFailed,
)
from protocol.messages import (
    Address,
    EngineRequest,
    RouterStatus,
    SamplingParams,
)
from router.admission import ClientRequest
from router.config import RouterConfig
from router.router import Router
from tests.router.router_world import D, P, World, status


def prompt(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def test_a_prompt_that_no_engine_computes_is_refused_with_the_limit() -> None:
    world = World(prefill=False)
    world.hello(Address("decode-0", 9), "decode", max_prompt_tokens=16)
    limit = "the longest prompt that an engine computes has 16 tokens"
    with pytest.raises(InvalidRequest, match=f"prompt: 17 tokens is not allowed: {limit}"):
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
    """The known tokens of an answer may outgrow what an engine takes as a prompt."""
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


def test_excess_waits_in_the_router_and_a_full_line_refuses() -> None:
    world = World(max_queue=3)
    for index in range(13):  # 2 seats, 8 dispatched ahead, 3 in the queue
        world.submit(f"r{index}")
    assert world.in_flight()["decode-0"] == 10
    with pytest.raises(Overloaded):
        world.submit("one too many")
    world.router.cancel("r0")
    assert world.in_flight()["decode-0"] == 10
    world.submit("fits again")


def test_several_requests_are_accepted_together_or_none_is() -> None:
    """Each engine of a pair has 2 seats and takes 8 ahead, and 3 requests may queue: 13 fit, 14 do not."""
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


def test_without_an_engine_requests_are_refused_and_without_prefill_decode_serves_alone() -> None:
    router = Router(RouterConfig(), address=Address("router", 3), clock=VirtualClock(), seed=1)
    with pytest.raises(RequestFailed, match="no decode engine"):
        router.submit(
            ClientRequest(request_id="r", prompt_token_ids=prompt(1), max_tokens=1, sampling=SamplingParams())
        )
    world = World(prefill=False)
    world.submit()
    assert [(to, m.role, m.peer) for to, m in world.sent(EngineRequest)] == [(D, "colocated", None)]


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
    """This holds whatever is up, suspected, draining or gone, under every kind of disaggregation."""

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
