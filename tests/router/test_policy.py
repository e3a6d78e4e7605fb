"""Every policy as a table of replicas with given loads and the one that it chooses."""

from typing import Any

import pytest

from protocol.messages import Address, Hello, ReplicaStatus
from router.policy import (
    POLICIES,
    STALE_STATUS_S,
    PlacementRequest,
    ReplicaView,
    Route,
    least_loaded,
    pick,
    prefix_aware,
    round_robin,
)

NOW = 100.0
CHAIN = [bytes([i]) * 16 for i in range(4)]


def replica(
    name: str,
    role: Any = "decode",
    *,
    free: int | None = None,
    age: float = 0.0,
    num_blocks: int = 101,
    max_model_len: int = 400,
    **fields: Any,
) -> ReplicaView:
    hello = Hello(
        role=role,
        layout_fingerprint=b"l",
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=2,
        max_model_len=max_model_len,
        max_prompt_tokens=fields.pop("max_prompt_tokens", min(max_model_len - 1, 4 * (num_blocks - 1))),
        endpoint=b"",
    )
    made = ReplicaView(Address(name, 1), hello, NOW - age)
    if free is not None:
        made.status = ReplicaStatus(
            state="up",
            seq=1,
            num_waiting=0,
            num_running=0,
            num_leases=0,
            num_pulls=0,
            num_early_handoffs=0,
            num_free_blocks=free,
        )
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def ask(
    num_tokens: int = 17, max_tokens: int = 8, hashes: list[bytes] = CHAIN, *, num_delivered: int = 0
) -> PlacementRequest:
    return PlacementRequest(num_tokens, num_delivered, max_tokens, hashes, NOW)


@pytest.mark.parametrize(("given", "chosen"), [((3, 1, 2), "b"), ((1, 1, 1), "a"), ((2, 2, 1), "c")])
def test_round_robin_takes_who_was_given_the_fewest(given: tuple[int, int, int], chosen: str) -> None:
    pool = [replica(name, num_dispatched=count) for name, count in zip("abc", given, strict=True)]
    assert round_robin(pool, ask()).address.replica_id == chosen


@pytest.mark.parametrize(
    ("pool", "chosen"),
    [
        ([replica("a", "prefill", num_prompt_tokens=50), replica("b", "prefill", num_prompt_tokens=10)], "b"),
        ([replica("a", "prefill", in_flight=2), replica("b", "prefill", in_flight=1)], "b"),
        ([replica("a", free=20), replica("b", free=60)], "b"),
        ([replica("a", free=20, num_blocks=101), replica("b", free=30, num_blocks=401)], "a"),
        # Blocks dispatched after the status count on top of it.
        ([replica("a", free=60, num_blocks_since_status=50), replica("b", free=40)], "b"),
        # A stale status counts for nothing; the router's attempts in flight count instead.
        ([replica("a", free=99, age=STALE_STATUS_S + 1), replica("b", free=90)], "a"),
        ([replica("a", free=99, age=STALE_STATUS_S + 1), replica("b", free=90)][::-1], "a"),
    ],
)
def test_least_loaded(pool: list[ReplicaView], chosen: str) -> None:
    assert least_loaded(pool, ask()).address.replica_id == chosen


def test_a_stale_status_is_replaced_by_what_the_router_has_in_flight() -> None:
    stale = replica("a", free=99, age=STALE_STATUS_S + 1, num_blocks=101)
    stale.num_blocks = 70
    assert stale.num_used_blocks(NOW) == 70
    fresh = replica("b", free=40)
    assert fresh.num_used_blocks(NOW) == 60
    assert least_loaded([stale, fresh], ask()) is fresh


@pytest.mark.parametrize(
    ("pool", "chosen"),
    [
        # Of 17 tokens 3 cached blocks save 12: they outweigh a queue that is longer by 10, but not by 13.
        ([replica("a", "prefill", num_prompt_tokens=10, hashes=set(CHAIN[:3])), replica("b", "prefill")], "a"),
        ([replica("a", "prefill", num_prompt_tokens=13, hashes=set(CHAIN[:3])), replica("b", "prefill")], "b"),
        # A missing block ends the prefix.
        ([replica("a", "prefill", hashes=set(CHAIN[1:])), replica("b", "prefill", hashes={CHAIN[0]})], "b"),
        ([replica("a", free=50, hashes=set(CHAIN)), replica("b", free=52)], "a"),
        ([replica("a", free=50, hashes=set(CHAIN)), replica("b", free=60)], "b"),
    ],
)
def test_prefix_aware_weighs_hits_against_load(pool: list[ReplicaView], chosen: str) -> None:
    assert prefix_aware(pool, ask()).address.replica_id == chosen


def test_at_least_one_token_is_always_computed() -> None:
    assert ask(num_tokens=16).num_uncached(replica("a", hashes=set(CHAIN))) == 1


def choose(
    prefill: list[ReplicaView],
    decode: list[ReplicaView],
    *,
    disaggregation: Any = "auto",
    minimum: int = 0,
    tokens: int = 17,
) -> Route | None:
    return pick(
        least_loaded, prefill, decode, ask(tokens), disaggregation=disaggregation, min_disaggregated_tokens=minimum
    )


P, D = Address("p", 1), Address("d", 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "chosen"),
    [
        ([replica("p", "prefill")], [replica("d")], {}, Route(P, D)),
        ([], [replica("d")], {}, Route(None, D)),
        ([replica("p", "prefill", state="suspected")], [replica("d")], {}, Route(None, D)),
        ([replica("p", "prefill", state="draining")], [replica("d")], {"disaggregation": "strict"}, None),
        ([replica("p", "prefill")], [replica("d")], {"disaggregation": "colocated"}, Route(None, D)),
        # If a pool is full, the request waits in the router instead of falling back.
        ([replica("p", "prefill", in_flight=10)], [replica("d")], {}, None),
        ([replica("p", "prefill")], [replica("d", in_flight=10)], {}, None),
        ([replica("p", "prefill")], [replica("d", state="suspected")], {}, None),
        # A prompt that no prefill engine can hold is computed by decode.
        ([replica("p", "prefill", num_blocks=3)], [replica("d")], {}, Route(None, D)),
        ([replica("p", "prefill", max_model_len=17)], [replica("d")], {}, Route(None, D)),
        ([replica("p", "prefill", max_model_len=18)], [replica("d")], {}, Route(P, D)),
        ([replica("p", "prefill", num_blocks=3)], [replica("d")], {"disaggregation": "strict"}, None),
        # Conditional disaggregation looks at the tokens that decode lacks.
        ([replica("p", "prefill")], [replica("d")], {"minimum": 18}, Route(None, D)),
        ([replica("p", "prefill")], [replica("d")], {"minimum": 17}, Route(P, D)),
        ([replica("p", "prefill")], [replica("d", hashes=set(CHAIN))], {"minimum": 17}, Route(None, D)),
    ],
)
def test_pick(
    prefill: list[ReplicaView], decode: list[ReplicaView], options: dict[str, Any], chosen: Route | None
) -> None:
    assert choose(prefill, decode, **options) == chosen


def test_a_policy_that_looks_at_hashes_says_so() -> None:
    """The choices of policies that want hashes change with them, and only theirs."""
    pool = [replica("a", free=50, num_blocks=101), replica("b", free=49, num_blocks=101, hashes=set(CHAIN))]
    for policy in POLICIES.values():
        chosen = {policy.choose(pool, ask(hashes=hashes)).address for hashes in (CHAIN, [])}
        assert (len(chosen) == 2) == policy.wants_hashes
