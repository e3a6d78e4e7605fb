"""The core's end of the doors: which door owns which answer, and what each door is still to be told.

 1. `take` hands a door's message to the core. What the core then puts out for clients is sorted by door (`collect`).
 2. A door gets everything that waits for it in one `Batch`, unless `MAX_BATCHES` of its batches are not handled yet.
    Then what comes meanwhile is joined, so that a slow door has long messages and not many.
 3. While more than a bound of tokens waits for a door, none of its queued requests is dispatched, and new ones are
    refused. Engines write no more for it than they have begun.
 4. A door that dies loses its own calls: the core cancels them, and nobody else notices.

Like the core it decides and executes nothing: batches appear in `outbox`.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from protocol.clock import Clock
from protocol.errors import InvalidRequest, RequestError, RequestFailed
from protocol.log import label
from protocol.messages import Address, Envelope, Message, TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.door_messages import (
    Abort,
    Aborted,
    AskLoads,
    Batch,
    Cancel,
    Counted,
    DoorMessage,
    Facts,
    Loads,
    Opened,
    Stop,
    Submit,
    Taken,
)
from router.metrics_totals import DoorTotals
from router.policy import ReplicaView
from router.request import Delivered, Ended

MAX_BATCHES = 2
"""How many batches a door may have that it has not handled: one in its hands and one on the way."""
FULL_BUFFERS = 4
"""A door with more tokens on the way than so many full buffers of clients is held."""

log = logging.getLogger(__name__)


class Core(Protocol):
    """The router's state machine as the doors need it. `events` are for clients, `outbox` is for engines."""

    outbox: list[tuple[Address, Message]]
    events: list[Delivered | Ended]

    @property
    def max_model_len(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_open(self) -> int: ...
    @property
    def num_queued(self) -> int: ...
    def replicas(self) -> Iterator[ReplicaView]: ...
    def submit(self, *requests: ClientRequest, door: Address) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stop(self, request_id: str) -> None: ...
    def hold(self, door: Address) -> None: ...
    def release(self, door: Address) -> None: ...
    def handle(self, envelope: Envelope) -> None: ...
    def tick(self) -> None: ...
    def drain(self, deadline_s: float) -> None: ...


@dataclass(slots=True)
class _Call:
    name: str
    open: set[str]
    """Request ids of its answers that have not ended."""


class _Owned(NamedTuple):
    """Whose an open answer is."""

    door: "_Door"
    number: int
    call: _Call


@dataclass(slots=True)
class _Door:
    address: Address
    open: dict[int, str] = field(default_factory=dict)
    """Request ids of its open answers by their numbers."""
    next_number: int = 0
    next_seq: int = 0
    on_the_way: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and tokens of each batch that it has not handled."""
    opened: list[Opened] = field(default_factory=list)
    aborted: list[Aborted] = field(default_factory=list)
    loads: list[Loads] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    facts: Facts | None = None
    """What it is to be told at the next tick or before; None if it knows."""
    num_new_tokens: int = 0
    """Tokens that wait for the next batch."""
    num_waiting_tokens: int = 0
    """Tokens that it has not handled: those for the next batch and those on the way."""
    held: bool = False

    def add(self, number: int, token_ids: list[int], logprobs: tuple[TokenLogprobs, ...]) -> None:
        waiting = self.tokens.get(number)
        if waiting is None:
            self.tokens[number] = token_ids
        else:
            waiting += token_ids
        if logprobs:
            self.logprobs.setdefault(number, []).extend(logprobs)
        self.num_new_tokens += len(token_ids)
        self.num_waiting_tokens += len(token_ids)

    def next_batch(self) -> Batch | None:
        """Takes what waits. Returns None if nothing does, or if the door is busy."""
        waits = self.tokens or self.ended or self.opened or self.aborted or self.loads or self.facts
        if len(self.on_the_way) == MAX_BATCHES or not waits:
            return None
        batch = Batch(
            self.next_seq,
            tuple(self.opened),
            tuple(self.aborted),
            tuple(self.loads),
            self.tokens,
            self.logprobs,
            tuple(self.ended),
            self.facts,
        )
        self.on_the_way.append((self.next_seq, self.num_new_tokens))
        self.next_seq += 1
        self.opened, self.aborted, self.loads = [], [], []
        self.tokens, self.logprobs, self.ended = {}, {}, []
        self.facts, self.num_new_tokens = None, 0
        return batch

    def taken(self, seq: int) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= seq:
            self.num_waiting_tokens -= self.on_the_way.popleft()[1]


class Doors:
    """Whoever gives this or the core an input calls `collect` directly afterwards, and then empties `outbox`."""

    def __init__(self, core: Core, config: RouterConfig, clock: Clock) -> None:
        self.outbox: list[tuple[Address, Batch]] = []
        self.totals = DoorTotals()
        """What all doors have told their clients. A door of the same process counts into it directly."""
        self._core, self._clock = core, clock
        self._max_tokens = FULL_BUFFERS * config.max_buffered_tokens
        self._doors: dict[Address, _Door] = {}
        self._owned: dict[str, _Owned] = {}
        """Every open answer by its request id."""
        self._calls: dict[str, _Call] = {}
        """Every open call by its name."""
        self._facts = self._facts_now()

    def door_up(self, address: Address) -> None:
        """Takes note of a door that has started. Its first batch has the facts."""
        for old in [old for old in self._doors if old.replica_id == address.replica_id]:
            self.door_down(old)
        self._doors[address] = _Door(address, facts=self._facts)

    def door_down(self, address: Address) -> None:
        """Takes note that a door is dead. Its requests are cancelled. An unknown door is ignored."""
        door = self._doors.pop(address, None)
        if door is None:
            return
        log.info("door down", extra={"peer": label(address), "num_open": len(door.open)})
        for request_id in door.open.values():
            self._core.cancel(request_id)
            self.totals.failed(RequestFailed("the door is gone"))
        self._core.release(address)

    def take(self, sender: Address, message: DoorMessage) -> None:
        """Takes one message of a door; the caller keeps their order. A door that is not up is ignored."""
        door = self._doors.get(sender)
        if door is None:
            return
        match message:
            case Taken(seq):
                door.taken(seq)
            case Submit():
                self._submit(door, message)
            case Cancel(numbers):
                for number in numbers:
                    if (request_id := door.open.get(number)) is not None:
                        self._core.cancel(request_id)
            case Stop(number):
                if (request_id := door.open.get(number)) is not None:
                    self._core.stop(request_id)
            case Abort(ask, name):
                call = self._calls.get(name)
                for request_id in sorted(call.open) if call else ():
                    self._core.cancel(request_id)
                door.aborted.append(Aborted(ask, call is not None))
            case AskLoads(ask):
                door.loads.append(self._loads(ask))
            case Counted(counts):
                self.totals.add(counts)

    def tick(self) -> None:
        """Tells every door what has changed since the last tick."""
        facts = self._facts_now()
        if facts != self._facts:
            self._facts = facts
            for door in self._doors.values():
                door.facts = facts

    def collect(self) -> None:
        """Sorts the core's events by door, and puts a batch into `outbox` for every door that can take one."""
        events = self._core.events[:]
        self._core.events.clear()
        for event in events:
            if isinstance(event, Delivered):
                self._sort(event)
            else:
                self._end(event)
        for door in self._doors.values():
            if (batch := door.next_batch()) is not None:
                self.outbox.append((door.address, batch))
            self._hold_or_release(door)

    def num_waiting_tokens(self, address: Address) -> int:
        """Returns how many tokens a door has not handled."""
        return self._doors[address].num_waiting_tokens

    def _submit(self, door: _Door, message: Submit) -> None:
        first, requests = message.first, message.requests
        if first < door.next_number:
            return  # it has come before
        door.next_number = first + len(requests)
        try:
            if message.name in self._calls:
                raise InvalidRequest("request_id", message.name, "a request of that name is still open")
            self._core.submit(*requests, door=door.address)
        except RequestError as refusal:
            door.opened.append(Opened(first, refusal))
            return
        door.opened.append(Opened(first, None))
        call = self._calls[message.name] = _Call(message.name, {request.request_id for request in requests})
        for number, request in enumerate(requests, first):
            door.open[number] = request.request_id
            self._owned[request.request_id] = _Owned(door, number, call)

    def _sort(self, delivered: Delivered) -> None:
        logprobs = delivered.logprobs
        for request_id, token_ids in delivered.rows():
            owned = self._owned.get(request_id)
            if owned is not None:
                owned.door.add(owned.number, token_ids, logprobs.get(request_id, ()))

    def _end(self, ended: Ended) -> None:
        owned = self._owned.pop(ended.request_id, None)
        if owned is None:
            return
        door, number, call = owned
        del door.open[number]
        door.ended.append((number, ended))
        call.open.remove(ended.request_id)
        if not call.open:
            del self._calls[call.name]

    def _hold_or_release(self, door: _Door) -> None:
        """Holds a door for which too many tokens wait, until half of them are gone."""
        if not door.held and door.num_waiting_tokens > self._max_tokens:
            door.held = True
            log.warning("a door is slow", extra={"peer": label(door.address), "tokens": door.num_waiting_tokens})
            self._core.hold(door.address)
        elif door.held and door.num_waiting_tokens <= self._max_tokens // 2:
            door.held = False
            self._core.release(door.address)

    def _facts_now(self) -> Facts:
        return Facts(self._core.ready, self._core.max_model_len)

    def _loads(self, ask: int) -> Loads:
        """The hashes of prefix caches stay here: they are many, and no client sees them."""
        now = self._clock()
        replicas = tuple((replace(view, hashes=set()), now - view.heard_at) for view in self._core.replicas())
        return Loads(ask, self._core.num_open, self._core.num_queued, replicas)
