"""Logprobs pass through the router with their tokens, once each, whichever engine is first, and across attempts."""

import pytest

from protocol.errors import ProtocolError
from protocol.messages import EngineRequest, Logprobs, SamplingParams, TokenLogprobs
from router.request import Delivered
from tests.router.router_world import D, P, World

ASKED = SamplingParams(temperature=1.0, seed=4, logprobs=1)


def entries(offset: int, *values: float, attempt: int = 1) -> tuple[Logprobs, ...]:
    return tuple(Logprobs(0, attempt, offset + i, TokenLogprobs(value)) for i, value in enumerate(values))


def received(world: World) -> list[tuple[list[int], list[float]]]:
    events = [event for event in world.router.events if isinstance(event, Delivered)]
    return [(e.token_ids, [values.chosen for values in e.logprobs.get(e.request_ids[0], ())]) for e in events]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_first_token_of_a_handoff_has_them_once(first: str) -> None:
    world = World()
    world.submit(sampling=ASKED)
    sayings = {
        "prefill": lambda: world.tokens(P, 0, [5], logprobs=entries(0, -0.5)),
        "decode": lambda: world.tokens(D, 0, [5, 6], logprobs=entries(1, -0.6) + entries(0, -0.5)),
    }
    for who in sorted(sayings, key=lambda name: name != first):
        sayings[who]()
    expected = [([5], [-0.5]), ([6], [-0.6])] if first == "prefill" else [([5, 6], [-0.5, -0.6])]
    assert received(world) == expected


def test_the_next_attempt_goes_on_and_keeps_the_seed() -> None:
    world = World()
    world.submit(sampling=ASKED)
    world.tokens(P, 0, [5], logprobs=entries(0, -0.5))
    world.sent()
    world.tokens(D, 0, [], ("failed", None, "no"))
    requests = [message for _, message in world.sent(EngineRequest)]
    assert {(request.offset, request.sampling) for request in requests} == {(1, ASKED)}
    world.tokens(D, 1, [6], attempt=2, logprobs=entries(1, -0.6, attempt=2))
    assert received(world) == [([5], [-0.5]), ([6], [-0.6])]


def test_who_did_not_ask_gets_none_and_who_asked_misses_none() -> None:
    world = World()
    world.submit()
    world.tokens(P, 0, [5], logprobs=entries(0, -0.5))
    assert received(world) == [([5], [])]
    other = World()
    other.submit(sampling=ASKED)
    with pytest.raises(ProtocolError, match="logprobs of 0 tokens came with 1"):
        other.tokens(P, 0, [5])
