"""An administrator drains an engine: it gets nothing new, in whatever life, until the order is taken back."""

import pytest

from protocol.errors import NotFound, RequestFailed
from protocol.messages import AbortRequest, Address, EngineRequest
from router.router import Router
from tests.router.router_world import D, P, World, status

D2 = Address("decode-1", 7)


def two_decodes(**config: object) -> World:
    world = World(**config)  # type: ignore[arg-type]
    world.hello(D2, "decode")
    world.sent()
    return world


def decodes(world: World) -> list[Address]:
    return [to for to, message in world.sent(EngineRequest) if message.role != "prefill"]


def states(router: Router) -> dict[str, str]:
    return {view.address.replica_id: view.state for view in router.replicas()}


def test_a_drained_engine_gets_nothing_new_and_keeps_what_it_has() -> None:
    world = two_decodes()
    world.submit("a")
    (first,) = decodes(world)
    assert world.router.set_drained(first.replica_id, True) == ""
    assert states(world.router)[first.replica_id] == "draining"
    assert not world.sent(AbortRequest) and world.in_flight()[first.replica_id] == 1
    world.submit("b")
    world.submit("c")
    other = D2 if first == D else D
    assert decodes(world) == [other, other]
    world.tokens(first, 0, [1, 2, 3, 4, 5], ("finished", "length", ""))
    assert world.ended().error is None and world.received() == [1, 2, 3, 4, 5]


def test_what_a_drained_engine_gives_back_goes_elsewhere() -> None:
    world = two_decodes()
    world.submit("a")
    (first,) = decodes(world)
    world.router.set_drained(first.replica_id, True)
    world.tokens(first, 0, [1], ("returned", None, "no room"))
    assert decodes(world) == [D2 if first == D else D]


def test_undrain_takes_it_back_and_what_waits_goes_there() -> None:
    world = World()
    world.submit("a")
    world.tokens(D, 0, [1], None)
    world.sent()
    effect = world.router.set_drained("decode-0", True)
    assert effect == "new requests are refused: no decode engine is up, those that are there drain"
    assert not world.router.ready
    with pytest.raises(RequestFailed, match="no decode engine is up, those that are there drain"):
        world.submit("b")
    world.tokens(D, 1, [2], ("returned", None, "no room"))
    world.router.tick()
    assert world.router.num_queued == 1 and not decodes(world)
    assert world.router.set_drained("decode-0", False) == ""
    assert decodes(world) == [D] and world.router.ready


@pytest.mark.parametrize(
    ("mode", "effect"),
    [
        ("auto", "no prefill engine is up, those that are there drain: decode engines compute the prompts that fit"),
        ("strict", "new requests are refused: disaggregation is strict and no prefill engine is up, those that"),
        ("colocated", ""),
    ],
)
def test_the_last_prefill_engine(mode: str, effect: str) -> None:
    world = World(disaggregation=mode)
    assert world.router.set_drained("prefill-0", True).startswith(effect)
    if mode == "strict":
        with pytest.raises(RequestFailed, match="strict and no prefill engine is up"):
            world.submit()
        return
    world.submit()
    assert [message.role for _, message in world.sent(EngineRequest)] == ["colocated"]


def test_the_order_outlives_the_engine_its_silence_and_the_router() -> None:
    world = two_decodes()
    world.router.set_drained("decode-0", True)
    world.router.replica_down(D)
    again = Address("decode-0", 9)
    world.hello(again, "decode")
    assert states(world.router)["decode-0"] == "draining"
    world.clock.advance_to(6.0)
    world.router.tick()
    assert states(world.router) == {"prefill-0": "suspected", "decode-0": "suspected", "decode-1": "suspected"}
    for address in (P, again, D2):
        world.say(address, status(99))
    assert states(world.router) == {"prefill-0": "up", "decode-0": "draining", "decode-1": "up"}
    successor = World(prefill=False)
    successor.router.restore_drained(world.router.drained_replicas)
    successor.router.replica_down(D)
    successor.hello(again, "decode")
    assert states(successor.router) == {"decode-0": "draining"}


def test_an_engine_that_is_away_can_be_drained_and_undrained() -> None:
    world = two_decodes()
    world.router.replica_down(D2)
    world.router.set_drained("decode-1", True)
    world.router.set_drained("decode-1", False)
    world.hello(D2, "decode")
    assert states(world.router)["decode-1"] == "up"


def test_an_unknown_engine_is_named_with_those_there_are() -> None:
    world = two_decodes()
    with pytest.raises(NotFound, match=r"replica: 'decode-7' is not found: the engines are decode-0, decode-1, prefi"):
        world.router.set_drained("decode-7", True)


def test_an_engine_that_drains_to_its_end_is_not_taken_back() -> None:
    world = two_decodes()
    world.router.drain_replica(D2, 5.0)
    world.router.set_drained("decode-1", True)
    world.router.set_drained("decode-1", False)
    assert states(world.router)["decode-1"] == "draining"
