"""One life of the core in front of doors that have processes of their own: the real `Doors`, and what must be true of
it. I15: a door gets exactly what the core delivers for its clients, and what a dead door waits for is cancelled. I16: a
door has few batches at once, and while too much waits for it, nothing new is begun for it.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from protocol.errors import RequestError
from protocol.messages import Address, EngineRequest, Message
from router.admission import ClientRequest
from router.door_messages import Batch, DoorMessage, Taken
from router.doors import FULL_BUFFERS, MAX_BATCHES, Doors
from router.request import Delivered, Ended
from router.router import Router
from simulator.audit import Audit
from simulator.doors import Connection
from simulator.event_queue import EventQueue
from simulator.scenario import Client, Scenario
from simulator.violation import Violation

Send = Callable[[Address, Message], None]


class HeardRouter(Router):
    """Tells of every request whether it has accepted it."""

    told: Callable[[ClientRequest, Address | None, RequestError | None], None]

    def submit(self, *requests: ClientRequest, door: Address | None = None) -> None:
        error: RequestError | None = None
        try:
            super().submit(*requests, door=door)
        except RequestError as refusal:
            error = refusal
            raise
        finally:
            for request in requests:
                self.told(request, door, error)


class CoreOfDoors:
    """Every method raises Violation if an invariant does not hold."""

    def __init__(
        self,
        queue: EventQueue,
        scenario: Scenario,
        router: HeardRouter,
        audit: Audit | None,
        clients: dict[str, Client],
    ) -> None:
        self._queue, self._scenario, self._router = queue, scenario, router
        self._audit, self._clients = audit, clients
        router.told = self._told
        self.doors = Doors(router, scenario.router, queue.clock)
        self._bound = FULL_BUFFERS * scenario.router.max_buffered_tokens
        self._epochs = itertools.count(1)
        self._connections: dict[Address, Connection] = {}
        self.open: dict[str, Address] = {}
        """By request id, the door of every request that the router has accepted and not ended."""
        self._on_the_way: dict[Address, deque[tuple[int, int]]] = {}
        """Number and tokens of each batch that its door has not acknowledged."""
        self._waiting: Counter[Address] = Counter()
        """Tokens that the core has delivered and the door has not acknowledged."""
        self._most: dict[Address, int] = {}
        """By door for which too many tokens wait: how many may come to."""

    def die(self) -> Iterable[Connection]:
        """The process is gone. Returns the connections that it had."""
        self.open.clear()
        return self._connections.values()

    def door_up(self, connection: Connection) -> None:
        address = connection.address = Address(connection.door.name, next(self._epochs))
        self._connections[address] = connection
        self._on_the_way[address] = deque()
        self.doors.door_up(address)

    def door_gone(self, connection: Connection) -> None:
        if connection.address is not None:
            self.doors.door_down(connection.address)

    def check_gone(self, connection: Connection) -> None:
        if connection.address is None:
            return
        left = [name for name, door in self.open.items() if door == connection.address]
        self._require(not left, f"I15: {left} of {connection.door.name} are open, and it is dead")
        del self._connections[connection.address]
        self._most.pop(connection.address, None)

    def take(self, connection: Connection, message: DoorMessage) -> None:
        address = connection.address
        assert address is not None, "its name came first"
        if isinstance(message, Taken):
            batches = self._on_the_way[address]
            while batches and batches[0][0] <= message.seq:
                self._waiting[address] -= batches.popleft()[1]
            if self._waiting[address] <= self._bound:
                self._most.pop(address, None)
        self.doors.take(address, message)

    def _told(self, request: ClientRequest, door: Address | None, error: RequestError | None) -> None:
        client = self._clients[request.request_id]
        if error is None:
            assert door is not None
            self.open[client.name] = door
        if self._audit is not None and error is None:
            self._audit.router.accepted(client)
        elif self._audit is not None and error is not None:
            self._audit.router.refused(client, error)

    def turn(self, send: Send) -> bool:
        """Sends what the router and the doors' end have put out. Returns False if there was nothing."""
        router, doors = self._router, self.doors
        for event in router.events:
            if isinstance(event, Delivered):
                self._delivered(event)
            else:
                self._ended(event)
        doors.collect()
        outbox, batches = router.outbox[:], doors.outbox[:]
        router.outbox.clear()
        doors.outbox.clear()
        for receiver, message in outbox:
            if isinstance(message, EngineRequest):
                door = self.open.get(message.key.request_id)
                self._require(door not in self._most, f"I16: {message.key.request_id} begins, and its door is full")
            send(receiver, message)
        for address, batch in batches:
            self._hand_out(address, batch)
        self._look_at_waiting()
        return bool(outbox or batches)

    def _delivered(self, event: Delivered) -> None:
        for name, token_ids in event.rows():
            door = self.open.get(name)
            if door is None:
                raise self._violation(f"I13: {event} after the terminal event")
            self._clients[name].delivered += token_ids
            self._waiting[door] += len(token_ids)

    def _ended(self, event: Ended) -> None:
        self._require(event.request_id in self.open, f"I13: {event} after the terminal event")
        client = self._clients[event.request_id]
        if self._audit is not None:
            self._audit.router.ended(client, event, len(client.delivered))
        del self.open[event.request_id]

    def _hand_out(self, address: Address, batch: Batch) -> None:
        batches, connection = self._on_the_way[address], self._connections[address]
        batches.append((batch.seq, sum(map(len, batch.tokens.values()))))
        self._require(len(batches) <= MAX_BATCHES, f"I16: {address.replica_id} has {len(batches)} batches")
        connection.to_door.send(partial(connection.door.receive, connection, batch))

    def _look_at_waiting(self) -> None:
        """I16: only what engines had begun for a full door may still come."""
        for address in self._connections:
            num_waiting = self._waiting[address]
            if num_waiting > self._bound and address not in self._most:
                begun = [entry for entry in self._router.active() if entry.door == address]
                self._most[address] = num_waiting + sum(entry.max_tokens - len(entry.delivered) for entry in begun)
            self._require(
                num_waiting <= self._most.get(address, self._bound),
                f"I16: {num_waiting} tokens wait for {address.replica_id}, {self._most.get(address)} may",
            )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._violation(what)

    def _violation(self, text: str) -> Violation:
        return Violation(self._scenario.seed, self._queue.clock.now, text)
