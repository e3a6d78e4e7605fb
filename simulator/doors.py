"""The doors of a simulated run: the real `DoorLink` of each, the ways between it and the core, and its clients.

A connection keeps order and ends with either process: of what the dead one sent last, some is lost, and then its end
arrives. The core's end, `router/doors.py`, is in core_of_doors.py.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from protocol.errors import RequestError, RequestFailed
from protocol.messages import Address, TokenLogprobs
from router.buffer import Buffer
from router.door_link import DoorEnd, DoorLink
from router.door_messages import Batch, DoorMessage
from router.request import Ended
from router.router import Router
from simulator.event_queue import Action, EventQueue
from simulator.scenario import Client, Scenario
from simulator.violation import Violation

RESTART_S = (0.02, 0.5, 3.0)
"""A dead door is replaced within one of these times; some successors come before the last words of the dead."""


class Way:
    """One direction of a connection. Each message takes a drawn time and passes none that was sent before."""

    def __init__(self, queue: EventQueue, seconds: Callable[[], float]) -> None:
        self._queue, self._seconds = queue, seconds
        self._last_at = 0.0
        self._num_sent, self._num_arriving = 0, 1 << 62

    def send(self, action: Action) -> None:
        self._plan(partial(self._arrive, self._num_sent, action))
        self._num_sent += 1

    def end(self, action: Action) -> None:
        """The sender is dead. What it sent arrives up to a drawn message, then the end."""
        self._num_arriving = self._num_sent - self._queue.random.choice([0, 0, 1, 2, 5])
        self._plan(action)

    def _plan(self, action: Action) -> None:
        self._last_at = max(self._last_at, self._queue.clock.now + self._seconds())
        self._queue.at_time(self._last_at, action)

    def _arrive(self, index: int, action: Action) -> None:
        if index < self._num_arriving:
            action()


class Connection:
    """Between one life of a door and one life of the core."""

    def __init__(self, door: "Door", core: Address, queue: EventQueue, seconds: Callable[[], float]) -> None:
        self.door, self.core = door, core
        self.address: Address | None = None
        """What the core calls the door, once it has heard of it."""
        self.to_core, self.to_door = Way(queue, seconds), Way(queue, seconds)


class CoreSide(Protocol):
    """The core's process, as doors reach it, and what the run must know of their clients."""

    alive: bool
    router: Router
    heard: set[str]
    touched: bool
    open: set[str]

    def violation(self, text: str) -> Violation: ...
    def door_up(self, connection: Connection) -> None: ...
    def door_says(self, connection: Connection, message: DoorMessage) -> None: ...
    def door_gone(self, connection: Connection) -> None: ...


class Door:
    """One life of a door: a `CoreLink` for its `DoorLink`."""

    def __init__(self, name: str, queue: EventQueue, core: CoreSide) -> None:
        self.name, self._queue, self._core = name, queue, core
        self.alive, self.resumes_at = True, 0.0
        self.connection: Connection | None = None
        self.seats: dict[str, Seat] = {}
        """By request id, the clients that it serves."""
        self.link = DoorLink(self)

    def connect(self, door: DoorEnd) -> None:
        """The supervisor will tell it of a core."""

    def send(self, message: DoorMessage) -> None:
        assert self.connection is not None
        self.connection.to_core.send(partial(self._core.door_says, self.connection, message))

    def core_up(self, connection: Connection) -> None:
        if self.connection is not None:
            self.core_gone(self.connection)
        self.connection = connection
        connection.to_core.send(partial(self._core.door_up, connection))
        self.link.up()

    def receive(self, connection: Connection, batch: Batch) -> None:
        if self._hears(connection) and not self.put_off(partial(self.receive, connection, batch)):
            try:
                self.link.receive(batch)
            except KeyError as unknown:
                raise self._core.violation(f"I15: {self.name} gets {batch}, and {unknown} is not open there") from None

    def core_gone(self, connection: Connection) -> None:
        if self._hears(connection) and not self.put_off(partial(self.core_gone, connection)):
            self.connection = None
            self.link.down()

    def put_off(self, action: Action) -> bool:
        """Plans an action for the end of a pause. Returns False if there is none."""
        if self._queue.clock.now >= self.resumes_at:
            return False
        self._queue.at_time(self.resumes_at, action)
        return True

    def _hears(self, connection: Connection) -> bool:
        return self.alive and self.connection is connection


class Seat:
    """A client at its door: a `Receiver`. Raises Violation if it gets anything but what the core has delivered."""

    def __init__(self, doors: "SimulatedDoors", door: Door, client: Client, buffer: Buffer | None) -> None:
        self._doors, self._door, self.client, self._buffer = doors, door, client, buffer
        self.number = -1
        self._ended = False

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        client, start = self.client, len(self.client.received)
        if self._ended or token_ids != client.delivered[start : start + len(token_ids)]:
            self._doors.fail(f"I15: {client.name} gets {token_ids} after {client.received} of {client.delivered}")
        client.received += token_ids
        client.received_at += [self._doors.now] * len(token_ids)
        client.logprobs += logprobs
        self._doors.heard(client)
        return self._buffer is not None and self._doors.keep(self._door, client, self._buffer)

    def end(self, ended: Ended) -> None:
        client = self.client
        if self._ended:
            self._doors.fail(f"I15: {client.name} gets a second end: {ended}")
        self._ended = True
        if ended.request_id != client.name:
            client.lost = True  # the core is gone
            if ended.error is None or ended.error.code != "UNAVAILABLE":
                self._doors.fail(f"I15: {client.name} is not told that the core is gone: {ended}")
        elif client.received != client.delivered:
            self._doors.fail(f"I15: {client.name} ends with {client.received}, the core delivered {client.delivered}")
        else:
            client.ended = ended if self._buffer is None else self._buffer.end(ended)
        self._doors.closed(client, str(ended.finish_reason or ended.error))


class SimulatedDoors:
    """All doors, what happens to them, and the clients that come to them."""

    def __init__(self, queue: EventQueue, scenario: Scenario, core: CoreSide) -> None:
        self._queue, self._scenario, self._core = queue, scenario, core
        self._places: dict[str, Door] = {}
        """Doors that live, by name."""
        self._kills_left, self._pauses_left = scenario.faults.door_kills, scenario.faults.door_pauses
        for index in range(scenario.num_doors):
            self._start(f"door-{index}")

    @property
    def now(self) -> float:
        return self._queue.clock.now

    @property
    def alive(self) -> list[Door]:
        return list(self._places.values())

    def fail(self, text: str) -> None:
        raise self._core.violation(text)

    # ---- the processes

    def core_started(self) -> None:
        for door in self._places.values():
            self._name_core(door)

    def core_died(self, connections: Iterable[Connection]) -> None:
        for connection in connections:
            connection.to_door.end(partial(connection.door.core_gone, connection))

    def look(self) -> None:
        """Draws what happens to the doors; the supervisor calls it again and again."""
        for door in self.alive:
            if self._kills_left and self.now > 0.5 and self._queue.chance(0.04):
                self._kills_left -= 1
                self._queue.at(self._queue.random.uniform(0.0, 0.1), partial(self.kill, door))
            elif self._pauses_left and self.now > 0.5 and self._queue.chance(0.04):
                self._pauses_left -= 1
                seconds = self._queue.random.uniform(0.1, 2.0)
                door.resumes_at = self.now + seconds
                self._queue.note(f"{door.name} pauses for {seconds:.1f} s")

    def _start(self, name: str) -> Door:
        door = self._places[name] = Door(name, self._queue, self._core)
        self._queue.note(f"start {name}")
        return door

    def _name_core(self, door: Door) -> None:
        """The supervisor tells a door of the present core, a little later."""

        def told() -> None:
            if self._core.alive and door.alive and not door.put_off(told):
                core = self._core.router.address
                if door.connection is None or door.connection.core != core:
                    door.core_up(Connection(door, core, self._queue, self._scenario.wire_seconds))

        self._queue.at(self._queue.random.uniform(0.005, 0.3), told)

    def kill(self, door: Door) -> None:
        """The process is gone at once, and a successor comes."""
        if not door.alive:
            return
        self._queue.note(f"kill {door.name}")
        door.alive = False
        del self._places[door.name]
        for seat in door.seats.values():
            seat.client.lost = True
            self._core.open.discard(seat.client.name)
        if door.connection is not None:
            door.connection.to_core.end(partial(self._core.door_gone, door.connection))
        delay_s = self._queue.random.choice(RESTART_S) * self._queue.random.random()
        self._queue.at(delay_s, lambda: self._name_core(self._start(door.name)))

    # ---- their clients

    def submit(self, client: Client, buffer: Buffer | None) -> None:
        if not self._places:
            self._refused(client, RequestFailed("no door is up"))
            return
        self._submit_at(self._queue.random.choice(self.alive), client, buffer)

    def _submit_at(self, door: Door, client: Client, buffer: Buffer | None) -> None:
        if door.put_off(partial(self._submit_at, door, client, buffer)):
            return
        if not door.alive:
            self._refused(client, RequestFailed("the door is down"))
            return
        seat = door.seats[client.name] = Seat(self, door, client, buffer)

        def opened(refusal: RequestError | None) -> None:
            if refusal is not None:
                del door.seats[client.name]
                self._refused(client, refusal)

        seat.number = door.link.submit(client.name, [client.request], [seat], opened)
        if client.cancel_after_s is not None:
            self._queue.at(client.cancel_after_s, partial(self.cancel, door, client, "cancel"))

    def cancel(self, door: Door, client: Client, why: str) -> None:
        """Ends a request at its door, or by its id at any other."""
        if not door.alive or door.put_off(partial(self.cancel, door, client, why)) or client.closed:
            return
        self._queue.num_faults += 1
        other = self._queue.random.choice(self.alive)
        self._queue.note(f"{why} {client.name} at {door.name} after {len(client.received)} tokens")
        if other is door or self.now < other.resumes_at:
            door.link.cancel([door.seats[client.name].number])
        else:
            other.link.abort(client.name, lambda found: None)

    def keep(self, door: Door, client: Client, buffer: Buffer) -> bool:
        """The tokens that a client does not take wait in its buffer. Returns whether that overflows now."""
        num_before = len(buffer)
        overflows = buffer.push(client.received[(client.stops_after or 0) + num_before :])
        if len(buffer) and not num_before:
            timeout_s = self._scenario.router.write_timeout_s
            self._queue.at(timeout_s, partial(self.cancel, door, client, "write timeout of"))
        if overflows:
            self._queue.num_faults += 1
            self._queue.note(f"{client.name} does not read: {len(buffer)} tokens wait for it")
        return overflows

    def heard(self, client: Client) -> None:
        self._core.heard.add(client.name)
        self._core.touched = True

    def closed(self, client: Client, how: str) -> None:
        self._core.open.discard(client.name)
        self._queue.note(f"ended {client.name}: {how}")
        self.heard(client)

    def _refused(self, client: Client, error: RequestError) -> None:
        client.refused = error
        self._queue.note(f"refused {client.name}: {error}")
        self._core.open.discard(client.name)
