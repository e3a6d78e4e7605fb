"""The choice of the engines that serve a request: pure functions of what the router knows.

`pick` returns a pair of engines, or a decode engine that serves colocated, or None if the request has to wait. It sorts
out engines that cannot serve; a policy then takes one of the candidates. A status may be too old: see `STALE_STATUS_S`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.messages import Address, Hello, ReplicaStatus

DISPATCH_AHEAD = 8
"""How many requests an engine gets beyond its seats, so that it never runs dry. All others wait in the router."""
STALE_STATUS_S = 3.0
"""A status older than this is ignored: the replica then counts as full as the router's attempts in flight make it."""


@dataclass(slots=True)
class ReplicaView:
    """One engine as the router sees it. The counts of what the router dispatched are always current; `status` was
    current at `heard_at`.
    """

    address: Address
    hello: Hello
    heard_at: float
    state: Literal["up", "suspected", "draining"] = "up"
    """Only an engine that is up gets anything new."""
    in_flight: int = 0
    """How many attempts were dispatched to it and are not over."""
    num_dispatched: int = 0
    """How many attempts were dispatched to it in all its life."""
    num_prompt_tokens: int = 0
    """Uncached prompt tokens of all attempts in flight, whether they wait or run."""
    num_blocks: int = 0
    """Blocks that the attempts in flight may come to hold."""
    num_blocks_since_status: int = 0
    """The part of `num_blocks` that was dispatched after the last status."""
    status: ReplicaStatus | None = None
    hashes: set[bytes] = field(default_factory=set)
    """Hashes of the blocks in its prefix cache, according to its statuses."""
    ending: bool = False
    """Whether it drains to its own end, which nobody can take back."""

    @property
    def num_places(self) -> int:
        """How many more attempts it may be given now."""
        return max(0, self.hello.max_num_seqs + DISPATCH_AHEAD - self.in_flight) if self.state == "up" else 0

    @property
    def has_room(self) -> bool:
        return self.num_places > 0

    @property
    def max_known_tokens(self) -> int:
        """The largest number of known tokens of a request whose KV it can compute."""
        return min((self.hello.num_blocks - 1) * self.hello.block_size, self.hello.max_model_len - 1)

    def takes(self, ask: "PlacementRequest") -> bool:
        """Whether it can compute all known tokens of a request. `max_prompt_tokens` limits only requests of which
        nothing was delivered yet.
        """
        begins = not ask.num_delivered
        return ask.num_tokens <= (self.hello.max_prompt_tokens if begins else self.max_known_tokens)

    def holds(self, ask: "PlacementRequest") -> bool:
        """Whether it has room for the whole answer, whose last token needs none."""
        return ask.num_tokens + ask.max_tokens - 1 <= self.max_known_tokens

    @property
    def blocks_by_state(self) -> dict[str, int]:
        """How many blocks are in each state, by the last status; empty before it."""
        status = self.status
        if status is None:
            return {}
        return {
            "used": self.hello.num_blocks - 1 - status.num_free_blocks - status.num_held_blocks,
            "held": status.num_held_blocks,
            "cached": status.num_cached_blocks,
            "blank": status.num_free_blocks - status.num_cached_blocks,
        }

    def num_used_blocks(self, now: float) -> int:
        """Blocks in use, by the last status and what was dispatched since; by the attempts in flight if it is stale."""
        if self.status is None or now - self.heard_at > STALE_STATUS_S:
            return self.num_blocks
        return self.hello.num_blocks - 1 - self.status.num_free_blocks + self.num_blocks_since_status

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain of hashes are in its cache, according to its statuses."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.hashes:
                return index
        return len(hashes)


class PlacementRequest(NamedTuple):
    """A request to be placed. `hashes` are of the full blocks of its prompt; they are empty if no rule needs them."""

    num_tokens: int
    """The tokens known so far: the prompt and the delivered ones."""
    num_delivered: int
    max_tokens: int
    hashes: Sequence[bytes]
    now: float

    def num_blocks(self, replica: ReplicaView) -> int:
        """How many blocks the request may come to hold in a decode engine."""
        return -(-(self.num_tokens + self.max_tokens - 1) // replica.hello.block_size)

    def num_uncached(self, replica: ReplicaView) -> int:
        """How many tokens a replica has no KV of. It is at least 1, because the last token is always computed."""
        return max(1, self.num_tokens - replica.num_cached(self.hashes) * replica.hello.block_size)


class AttemptLoad(NamedTuple):
    """What one attempt in flight weighs in one engine, from dispatch to its end."""

    num_prompt_tokens: int
    num_blocks: int


NO_LOAD = AttemptLoad(0, 0)


class Route(NamedTuple):
    """The engines of an attempt. `prefill` is None if the decode engine serves colocated."""

    prefill: Address | None
    decode: Address


Choose = Callable[[Sequence[ReplicaView], PlacementRequest], ReplicaView]
"""Takes one of the candidates, of which there is at least one, all from the same pool."""


def round_robin(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """Takes the replica that was given the fewest attempts so far, so that all get their turn."""
    return min(candidates, key=lambda r: (r.num_dispatched, r.address))


def least_loaded(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """Takes the prefill engine with the fewest uncached prompt tokens in flight, or the decode engine with the smallest
    share of its KV blocks in use.
    """

    def load(replica: ReplicaView) -> float:
        if replica.hello.role == "prefill":
            return replica.num_prompt_tokens
        return replica.num_used_blocks(ask.now) / replica.hello.num_blocks

    return min(candidates, key=lambda r: (load(r), r.in_flight, r.address))


def prefix_aware(candidates: Sequence[ReplicaView], ask: PlacementRequest) -> ReplicaView:
    """Like `least_loaded`, but adds the cost of this request. A cached prefix counts as the work or room it saves."""

    def cost(replica: ReplicaView) -> float:
        if replica.hello.role == "prefill":
            return replica.num_prompt_tokens + ask.num_uncached(replica)
        num_new = ask.num_blocks(replica) - replica.num_cached(ask.hashes)
        return (replica.num_used_blocks(ask.now) + num_new) / replica.hello.num_blocks

    return min(candidates, key=lambda r: (cost(r), r.in_flight, r.address))


class Policy(NamedTuple):
    choose: Choose
    wants_hashes: bool = False
    """Whether it looks at `PlacementRequest.hashes`, which cost a pass over the prompt."""


POLICIES: dict[str, Policy] = {
    "round_robin": Policy(round_robin),
    "least_loaded": Policy(least_loaded),
    "prefix_aware": Policy(prefix_aware, wants_hashes=True),
}
"""All policies by their name in `router.policy`. There is no other list."""

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
    """Chooses a pair of engines, or a decode engine that serves colocated, or None if none is free.

    A decode engine serves colocated if it lacks few tokens of the prompt, or if no prefill engine that is up can take
    the request and disaggregation is not strict. If its own limits forbid that, the request waits for a prefill engine.
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
    """Whether engines are up but none of them could ever serve the request, which has to wait for one that is away."""
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
    """How many such requests `pick` can place now, at least. Those that need no prefill engine may fit beyond it."""
    num_decode = sum(r.num_places for r in decode if r.holds(ask))
    able = _able(prefill, ask)
    if disaggregation == "colocated" or (not able and disaggregation == "auto"):
        return num_decode
    return min(num_decode, sum(r.num_places for r in able))


def _able(prefill: Sequence[ReplicaView], ask: PlacementRequest) -> list[ReplicaView]:
    return [r for r in prefill if r.state == "up" and r.takes(ask)]
