"""The engines as the router knows them: which have started, which are up, how busy they are, and what they can hold."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

from protocol.clock import Clock
from protocol.errors import InvalidRequest, NotFound, RequestFailed
from protocol.log import label
from protocol.messages import (
    Address,
    Drain,
    Envelope,
    Hello,
    Message,
    PeerDown,
    PeerUp,
    PoolName,
    ReplicaStatus,
    RouterStatus,
)
from router.admission import ClientRequest, Limits
from router.metrics_totals import ReplicaTotals
from router.policy import AttemptLoad, Disaggregation, PlacementRequest, ReplicaView, num_places

log = logging.getLogger(__name__)


class Fleet:
    """Replicas by address. An address is present from its `Hello` until it is down; only its newest epoch counts."""

    def __init__(self, clock: Clock, outbox: list[tuple[Address, Message]], *, replica_timeout_s: float) -> None:
        self._clock = clock
        self._outbox = outbox
        self._timeout_s = replica_timeout_s
        self._started: dict[str, Address] = {}
        self._replicas: dict[Address, ReplicaView] = {}
        self._drained: set[str] = set()
        """Replica ids of those that an administrator has drained. The order outlives the engine's process."""
        self._roles: dict[str, PoolName] = {}
        """The pool of every replica that has ever said hello, by replica id."""
        self._past: dict[str, ReplicaTotals] = {}
        """By replica id, what its past lives have counted, as of the last status of each."""
        self.limits: Limits | None = None
        """The limits of the smallest decode engine ever seen: any engine must be able to take over any request."""
        self.max_prefill_tokens = 0
        """The longest prompt, in tokens, that any prefill engine ever seen computes."""

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas.values())

    def knows(self, address: Address) -> bool:
        """Whether this is the present epoch of a replica that was started and is not down."""
        return self._started.get(address.replica_id) == address

    def has_up(self, role: PoolName) -> bool:
        return any(replica.hello.role == role and replica.state == "up" for replica in self)

    def why_away(self, role: PoolName) -> str:
        """Why no replica of a pool takes anything new; "" if one does."""
        if self.has_up(role):
            return ""
        drains = any(replica.state == "draining" for replica in self.pool(role))
        return f"no {role} engine is up" + (", those that are there drain" if drains else "")

    def pool(self, role: PoolName) -> list[ReplicaView]:
        return [replica for replica in self if replica.hello.role == role]

    def check(self, request: ClientRequest, disaggregation: Disaggregation) -> int:
        """Returns the answer's length limit in tokens. A decode engine must be up.

        Raises InvalidRequest if no engine ever seen could serve the request, and RequestFailed if those that could
        compute its prompt are away. With strict disaggregation a prefill engine that is up must hold even the last
        retry of the request, so that nothing has to fall back silently.
        """
        assert self.limits is not None, "a decode engine is up"
        max_tokens, num_prompt = self.limits.check(request), len(request.prompt_token_ids)
        colocated = 0 if disaggregation == "strict" else self.limits.max_prompt_tokens
        if num_prompt <= colocated:
            return max_tokens
        longest = colocated if disaggregation == "colocated" else max(colocated, self.max_prefill_tokens)
        if num_prompt > longest:
            limit = f"the longest prompt that an engine computes has {longest} tokens"
            raise InvalidRequest("prompt", f"{num_prompt} tokens", limit)
        able = [r for r in self.pool("prefill") if r.state == "up" and num_prompt <= r.hello.max_prompt_tokens]
        if not able:
            raise RequestFailed(f"no prefill engine that computes a prompt of {num_prompt} tokens is up")
        num_tokens, room = num_prompt + max_tokens - 1, max(r.max_known_tokens for r in able)
        if disaggregation == "strict" and num_tokens > room:
            limit = f"prefill engines hold {room} tokens"
            raise InvalidRequest("prompt", f"{num_tokens} tokens with its answer", limit)
        return max_tokens

    def num_places(
        self, requests: Sequence[ClientRequest], max_tokens: Sequence[int], disaggregation: Disaggregation
    ) -> int:
        """Returns how many requests could be dispatched at once, if all were like the longest of these."""
        num_tokens = max(len(request.prompt_token_ids) for request in requests)
        ask = PlacementRequest(num_tokens, 0, max(max_tokens), (), self._clock())
        return num_places(self.pool("prefill"), self.pool("decode"), ask, disaggregation=disaggregation)

    def started(self, address: Address) -> Address | None:
        """Takes note of an engine that was started. Returns the epoch that it replaces, if that was not down yet."""
        old = self._started.get(address.replica_id)
        self._started[address.replica_id] = address
        return old

    def down(self, address: Address) -> None:
        if self.knows(address):
            del self._started[address.replica_id]
        replica = self._replicas.pop(address, None)
        if replica is not None:
            log.info("replica down", extra={"peer": label(address)})
        if replica is not None and replica.hello.role == "prefill":
            self._outbox.extend((decode.address, PeerDown(peer=address)) for decode in self.pool("decode"))
        if replica is not None and replica.status is not None:
            self._past.setdefault(address.replica_id, ReplicaTotals(replica.hello.role)).add(replica.status)

    def totals(self) -> dict[str, ReplicaTotals]:
        """Returns by replica id what the replica has counted in all its lives, the present one included."""
        totals = {replica_id: past.copy() for replica_id, past in self._past.items()}
        for replica in self:
            if replica.status is not None:
                totals.setdefault(replica.address.replica_id, ReplicaTotals(replica.hello.role)).add(replica.status)
        return totals

    def on_hello(self, envelope: Envelope) -> None:
        """Adds an engine. Decode engines are told of prefill engines, whichever comes up first."""
        hello, address = cast(Hello, envelope.message), envelope.sender
        self._replicas[address] = replica = ReplicaView(address, hello, self._clock())
        replica.state = self._state_of(replica)
        self._roles[address.replica_id] = hello.role
        log.info("replica up", extra={"peer": label(address), "num_blocks": hello.num_blocks})
        if hello.role == "prefill":
            self.max_prefill_tokens = max(self.max_prefill_tokens, hello.max_prompt_tokens)
            self._outbox.extend(
                (decode.address, PeerUp(peer=address, endpoint=hello.endpoint)) for decode in self.pool("decode")
            )
            return
        limits = Limits.of(hello)
        self.limits = limits if self.limits is None else limits.smaller(self.limits)
        for prefill in self.pool("prefill"):
            self._outbox.append((address, PeerUp(peer=prefill.address, endpoint=prefill.hello.endpoint)))

    def on_status(self, envelope: Envelope) -> None:
        """Takes note of liveness and load. A suspected replica that speaks again is up again."""
        replica = self._replicas.get(envelope.sender)
        if replica is None:
            return
        status = cast(ReplicaStatus, envelope.message)
        replica.status, replica.heard_at, replica.num_blocks_since_status = status, self._clock(), 0
        replica.hashes.update(status.hashes_added)
        replica.hashes.difference_update(status.hashes_removed)
        if replica.state == "suspected":
            log.info("replica up again", extra={"peer": label(envelope.sender)})
        replica.ending |= status.state == "draining"  # ordered by someone else, perhaps by a previous router
        replica.state = self._state_of(replica)

    def suspect(self, address: Address) -> None:
        if address in self._replicas:
            self._replicas[address].state = "suspected"
            log.info("replica suspected", extra={"peer": label(address)})

    def newly_silent(self) -> list[Address]:
        """Returns the replicas whose status has become overdue. They are suspected from now on."""
        before = self._clock() - self._timeout_s
        silent = [replica.address for replica in self if replica.state != "suspected" and replica.heard_at <= before]
        for address in silent:
            self.suspect(address)
        return silent

    def _state_of(self, replica: ReplicaView) -> Literal["up", "draining"]:
        """The state of a replica that speaks."""
        return "draining" if replica.ending or replica.address.replica_id in self._drained else "up"

    @property
    def drained(self) -> frozenset[str]:
        """Replica ids of those that an administrator has drained, whether they are there or not."""
        return frozenset(self._drained)

    @property
    def roles(self) -> dict[str, PoolName]:
        """The pool of every replica that has ever said hello, by replica id."""
        return dict(self._roles)

    def restore_drained(self, replica_ids: Iterable[str]) -> None:
        """Takes over the orders that a previous router had."""
        self._drained.update(replica_ids)

    def set_drained(self, replica_id: str, drained: bool) -> None:
        """Raises NotFound for a replica that was never heard of."""
        if replica_id not in self._roles and replica_id not in self._drained:
            raise NotFound("replica", repr(replica_id), f"the engines are {', '.join(sorted(self._roles)) or 'away'}")
        (self._drained.add if drained else self._drained.discard)(replica_id)
        for replica in self:
            if replica.address.replica_id == replica_id and replica.state != "suspected":
                replica.state = self._state_of(replica)
        log.info("replica drains" if drained else "replica drains no more", extra={"peer": replica_id})

    def drain(self, address: Address, deadline_s: float) -> None:
        """Orders an engine to be done with all that it has by its deadline, after which it ends."""
        if address in self._replicas:
            replica = self._replicas[address]
            replica.ending, replica.state = True, "draining"
            log.info("replica drains", extra={"peer": label(address), "deadline_s": deadline_s})
            self._outbox.append((address, Drain(deadline_s=deadline_s)))

    def load(self, address: Address, load: AttemptLoad) -> None:
        """Books an attempt that was dispatched to a replica."""
        replica = self._replicas[address]
        replica.in_flight += 1
        replica.num_dispatched += 1
        replica.num_prompt_tokens += load.num_prompt_tokens
        replica.num_blocks += load.num_blocks
        replica.num_blocks_since_status += load.num_blocks

    def unload(self, address: Address, load: AttemptLoad) -> None:
        """Takes an attempt off again when it is over. Does nothing for a replica that is down."""
        replica = self._replicas.get(address)
        if replica is not None:
            replica.in_flight -= 1
            replica.num_prompt_tokens -= load.num_prompt_tokens
            replica.num_blocks -= load.num_blocks
            replica.num_blocks_since_status = max(0, replica.num_blocks_since_status - load.num_blocks)

    def load_of(self, address: Address, ask: PlacementRequest) -> AttemptLoad:
        """Returns what an attempt weighs in a replica."""
        replica = self._replicas[address]
        return AttemptLoad(ask.num_uncached(replica) if replica.hello.role == "prefill" else 0, ask.num_blocks(replica))

    def send_status(self, router_epoch: int, seq: int, to: Address | None = None, *, returns: bool = True) -> None:
        """Sends a status to one engine, or to all that were started. `returns`: whether requests that a decode engine
        returns may go to the prefill pool.
        """
        room = [
            (r.status.num_free_blocks, r.max_known_tokens)
            for r in self.pool("prefill")
            if r.state == "up" and r.status is not None
        ]
        num_blocks, max_tokens = max(room, default=(0, 0)) if returns else (0, 0)
        status = RouterStatus(
            router_epoch=router_epoch, seq=seq, prefill_room_blocks=num_blocks, prefill_max_tokens=max_tokens
        )
        self._outbox.extend((address, status) for address in ([to] if to else self._started.values()))
