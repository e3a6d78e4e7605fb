"""Which engines serve the next request: pure functions over what the router knows. All or nothing: a pair, one
colocated, or None (wait).

`pick` gates and pairs; a `Choose` ranks the candidates of one pool. Statuses may be old: `STALE_STATUS_S` is the rule
for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.messages import Address, Hello, ReplicaStatus

DISPATCH_AHEAD = 8
"""Requests an engine is given beyond its seats, so that it never runs dry between two messages; all others wait in the
router.
"""
STALE_STATUS_S = 3.0
"""An older status counts for nothing: then a replica is as full as what the router itself has in flight there."""


@dataclass(slots=True)
class ReplicaView:
    """One engine as the router sees it. What the router dispatched itself is always current; `status` is as old as
    `heard_at` says.
    """

    address: Address
    hello: Hello
    heard_at: float
    state: Literal["up", "suspected", "draining"] = "up"
    in_flight: int = 0
    """Attempts dispatched to it that are not over."""
    num_dispatched: int = 0
    """In all its life."""
    num_prompt_tokens: int = 0
    """Uncached prompt tokens of the attempts in flight, waiting and running."""
    num_blocks: int = 0
    """Blocks that the attempts in flight may come to hold."""
    num_blocks_since_status: int = 0
    """Of those, the ones dispatched after the last status."""
    status: ReplicaStatus | None = None
    hashes: set[bytes] = field(default_factory=set)
    """Block hashes in its prefix cache, as its statuses tell."""

    @property
    def num_places(self) -> int:
        """Attempts that it may be given now."""
        return max(0, self.hello.max_num_seqs + DISPATCH_AHEAD - self.in_flight) if self.state == "up" else 0

    @property
    def has_room(self) -> bool:
        return self.num_places > 0

    @property
    def max_known_tokens(self) -> int:
        """Most known tokens of a request whose KV it can ever compute."""
        return min((self.hello.num_blocks - 1) * self.hello.block_size, self.hello.max_model_len - 1)

    def takes(self, ask: "PlacementRequest") -> bool:
        """Whether it can compute all that is known of a request. Only a prompt that nothing was delivered for has to
        fit as a prompt.
        """
        begins = not ask.num_delivered
        return ask.num_tokens <= (self.hello.max_prompt_tokens if begins else self.max_known_tokens)

    def holds(self, ask: "PlacementRequest") -> bool:
        """Whether the whole answer finds room here; its last token needs none."""
        return ask.num_tokens + ask.max_tokens - 1 <= self.max_known_tokens

    def num_used_blocks(self, now: float) -> int:
        if self.status is None or now - self.heard_at > STALE_STATUS_S:
            return self.num_blocks
        return self.hello.num_blocks - 1 - self.status.num_free_blocks + self.num_blocks_since_status

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a chain that its cache is said to hold."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.hashes:
                return index
        return len(hashes)


class PlacementRequest(NamedTuple):
    """What is to be placed. `hashes`: of the full blocks of its known tokens; empty where no rule looks at them."""

    num_tokens: int
    """Known: the prompt and what was delivered."""
    num_delivered: int
    max_tokens: int
    hashes: Sequence[bytes]
    now: float

    def num_blocks(self, replica: ReplicaView) -> int:
        """Blocks it may come to hold in a decode engine."""
        return -(-(self.num_tokens + self.max_tokens - 1) // replica.hello.block_size)

    def num_uncached(self, replica: ReplicaView) -> int:
        """Tokens whose KV this engine does not have; at least the last one is always computed."""
        return max(1, self.num_tokens - replica.num_cached(self.hashes) * replica.hello.block_size)


class AttemptLoad(NamedTuple):
    """What one attempt in flight weighs in one engine, from dispatch to its end."""

    num_prompt_tokens: int
    num_blocks: int


NO_LOAD = AttemptLoad(0, 0)


class Route(NamedTuple):
    prefill: Address | None
    decode: Address


Choose = Callable[[Sequence[ReplicaView], PlacementRequest], ReplicaView]
"""Takes one of at least one candidate of the same pool."""


def round_robin(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """Everybody in turn: who was given the fewest so far."""
    return min(candidates, key=lambda r: (r.num_dispatched, r.address))


def least_loaded(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """Prefill: fewest uncached prompt tokens waiting and running. Decode: smallest share of its KV blocks in use."""

    def load(replica: ReplicaView) -> float:
        if replica.hello.role == "prefill":
            return replica.num_prompt_tokens
        return replica.num_used_blocks(ask.now) / replica.hello.num_blocks

    return min(candidates, key=lambda r: (load(r), r.in_flight, r.address))


def prefix_aware(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """As `least_loaded`, with this request's own cost added: a cached prefix weighs as much as the work or room it
    saves.
    """

    def cost(replica: ReplicaView) -> float:
        if replica.hello.role == "prefill":
            return replica.num_prompt_tokens + ask.num_uncached(replica)
        num_new = ask.num_blocks(replica) - replica.num_cached(ask.hashes)
        return (replica.num_used_blocks(ask.now) + num_new) / replica.hello.num_blocks

    return min(candidates, key=lambda r: (cost(r), r.in_flight, r.address))


class Policy(NamedTuple):
    choose: Choose
    wants_hashes: bool = False
    """It looks at `PlacementRequest.hashes`, which cost a pass over the prompt."""


POLICIES: dict[str, Policy] = {
    "round_robin": Policy(round_robin),
    "least_loaded": Policy(least_loaded),
    "prefix_aware": Policy(prefix_aware, wants_hashes=True),
}
"""By name, as `router.policy` gives it: the one list of them."""

Disaggregation = Literal["auto", "strict", "colocated"]


def pick(
    choose: Choose,
    prefill: Sequence[ReplicaView],
    decode: Sequence[ReplicaView],
    ask: PlacementRequest,
    *,
    disaggregation: Disaggregation,
    min_disaggregated_tokens: int,
) -> Route | None:
    """A decode engine serves colocated when the prompt it lacks is short, or (not in strict) when no live prefill
    engine can take it.

    Which it can do only if its own limits allow: else the request waits for a prefill engine.
    """
    free_decode = [r for r in decode if r.has_room and r.holds(ask)]
    if not free_decode:
        return None
    chosen = choose(free_decode, ask)
    able = _able(prefill, ask) if disaggregation != "colocated" else []
    colocated = ask.num_uncached(chosen) < min_disaggregated_tokens or (not able and disaggregation != "strict")
    if colocated and chosen.takes(ask):
        return Route(None, chosen.address)
    free_prefill = [r for r in able if r.has_room]
    return Route(choose(free_prefill, ask).address, chosen.address) if free_prefill else None


def too_large_for_all(
    prefill: Sequence[ReplicaView],
    decode: Sequence[ReplicaView],
    ask: PlacementRequest,
    *,
    disaggregation: Disaggregation,
) -> bool:
    """Whether engines are up, and none of them could ever serve this: it waits for one that is away."""
    up_decode = [r for r in decode if r.state == "up"]
    able_decode = [r for r in up_decode if r.holds(ask)]
    if not able_decode:
        return bool(up_decode)
    if disaggregation == "strict":
        return any(r.state == "up" for r in prefill) and not _able(prefill, ask)
    if any(r.takes(ask) for r in able_decode):
        return False
    return disaggregation == "colocated" or not _able(prefill, ask)


def num_places(
    prefill: Sequence[ReplicaView],
    decode: Sequence[ReplicaView],
    ask: PlacementRequest,
    *,
    disaggregation: Disaggregation,
) -> int:
    """How many such requests `pick` places one after the other, at least: more where some need no prefill engine."""
    num_decode = sum(r.num_places for r in decode if r.holds(ask))
    able = _able(prefill, ask)
    if disaggregation == "colocated" or (not able and disaggregation == "auto"):
        return num_decode
    return min(num_decode, sum(r.num_places for r in able))


def _able(prefill: Sequence[ReplicaView], ask: PlacementRequest) -> list[ReplicaView]:
    return [r for r in prefill if r.state == "up" and r.takes(ask)]
