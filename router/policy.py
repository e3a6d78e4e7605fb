"""Which engines serve the next request: pure functions over what the router knows. All or nothing: a pair, one alone, or None (wait)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from protocol.messages import Address, Hello, ReplicaStatus

DISPATCH_AHEAD = 8
"""Requests an engine is given beyond its seats, so that it never runs dry between two messages; all others wait in the router."""


@dataclass(slots=True)
class Replica:
    """One engine as the router sees it. `in_flight`: attempts dispatched to it that are not over."""

    address: Address
    hello: Hello
    heard_at: float
    state: Literal["up", "suspected", "draining"] = "up"
    in_flight: int = 0
    status: ReplicaStatus | None = None

    @property
    def has_room(self) -> bool:
        return self.state == "up" and self.in_flight < self.hello.max_num_seqs + DISPATCH_AHEAD


class Pick(NamedTuple):
    prefill: Address | None
    decode: Address


def least_in_flight(prefill: Iterable[Replica], decode: Iterable[Replica], *, num_prompt_tokens: int) -> Pick | None:
    """The least busy of each pool. Without any live prefill engine (or none that can hold the prompt) a decode engine serves alone."""
    able = [r for r in prefill if r.state == "up" and (r.hello.num_blocks - 1) * r.hello.block_size >= num_prompt_tokens]
    free_decode = [r for r in decode if r.has_room]
    free_prefill = [r for r in able if r.has_room]
    if not free_decode or (able and not free_prefill):
        return None
    chosen = min(free_decode, key=lambda r: (r.in_flight, r.address))
    if not able:
        return Pick(None, chosen.address)
    return Pick(min(free_prefill, key=lambda r: (r.in_flight, r.address)).address, chosen.address)
