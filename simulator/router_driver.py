"""The router of a simulated run, one life after another, and the clients at its own door."""

from collections.abc import Iterable, Iterator
from functools import partial

from protocol.delivery import Incoming, Outgoing
from protocol.errors import NotFound, RequestError, RequestFailed
from protocol.messages import ROUTER_ID, Address, EngineRequest, Envelope, Message
from router.buffer import Buffer
from router.door_messages import DoorMessage
from router.request import Delivered, Ended
from router.router import Router
from simulator.audit import Audit
from simulator.core_of_doors import CoreOfDoors, HeardRouter
from simulator.doors import Connection, SimulatedDoors
from simulator.event_queue import Action, EventQueue
from simulator.scenario import Client, Scenario
from simulator.violation import Violation
from simulator.wire import Wire, text

TICK_S = 0.1


class RouterDriver:
    """Owns the router's core, as `router/actor.py` and the front doors do for a real one."""

    def __init__(
        self, queue: EventQueue, scenario: Scenario, wire: Wire, epochs: Iterator[int], audit: Audit | None
    ) -> None:
        self._queue, self._scenario, self._wire, self._epochs, self._audit = queue, scenario, wire, epochs, audit
        self.clients = {client.request.request_id: client for client in scenario.clients}
        self.open = set(self.clients)
        """Clients whose end is still to come, by request id."""
        self.heard: set[str] = set()
        """Clients that got something since the invariants looked last, by request id."""
        self.lost: set[Address] = set()
        """Engines that the router has given up and that are to be ended."""
        self.touched = True
        """True if the router got something since the invariants looked last."""
        self._submitted: set[str] = set()
        max_tokens = scenario.router.max_buffered_tokens
        self._buffers = {
            name: Buffer(max_tokens) for name, client in self.clients.items() if client.stops_after is not None
        }
        """Buffers of the clients that will stop reading, by request id."""
        self._kills_left, self._pauses_left = scenario.faults.router_kills, scenario.faults.router_pauses
        self._resumes_at = self._ticks_late_s = 0.0
        self.drained: set[str] = set()
        """Replica ids of the engines that the administrator has drained, as the supervisor keeps them."""
        self.doors = SimulatedDoors(queue, scenario, self) if scenario.num_doors else None
        self.router: Router
        self._far: CoreOfDoors | None
        """The core's end of the doors; None without doors in processes of their own."""
        self.start(())

    @property
    def busy(self) -> bool:
        """Whether a client, or the core, still waits for the end of a request."""
        return bool(self.open or (self._far is not None and self._far.open))

    def start(self, engines: Iterable[Address]) -> None:
        """Starts a router with an empty table and a new epoch. The supervisor tells it which engines live."""
        address = Address(ROUTER_ID, next(self._epochs))
        config, clock, seed = self._scenario.router, self._queue.clock, self._scenario.seed
        self.router, self._far = Router(config, address=address, clock=clock, seed=seed), None
        if self.doors is not None:
            self.router = router = HeardRouter(config, address=address, clock=clock, seed=seed)
            self._far = CoreOfDoors(self._queue, self._scenario, router, self._audit, self.clients)
        self._incoming, self._outgoing = Incoming(address, self._queue.clock), Outgoing(address)
        self.alive, self._resumes_at = True, 0.0
        self._wire.inlets[ROUTER_ID] = self._arrived
        if self._audit is not None:
            self._audit.router_starts(self.router)
        self._queue.note(f"start router epoch {address.epoch}")
        self.router.restore_drained(self.drained)
        for engine in engines:
            self.router.replica_started(engine)
        self.flush()
        if self.doors is not None:
            self.doors.core_started()
        self._tick(self.router)

    def dies(self) -> bool:
        """Draws whether the router dies now; asked at every look of the supervisor."""
        if self._kills_left and self.alive and self._queue.clock.now > 0.5 and self._queue.chance(0.008):
            self._kills_left -= 1
            return True
        return False

    def kill(self) -> None:
        self._queue.note("kill router")
        self.alive = False
        del self._wire.inlets[ROUTER_ID]
        self._wire.cut_off(self._outgoing)
        if self._audit is not None:
            self._audit.router_dies()
        if self.doors is not None and self._far is not None:
            self.doors.core_died(self._far.die())
            return
        for name in self.open & self._submitted:
            self.clients[name].lost = True
            self.open.discard(name)

    def pauses(self) -> None:
        """Draws, at every look of the supervisor, whether the router pauses: its process does nothing for a while, and
        all that is to happen to it waits.

        It is drawn too whether the router then first reads its messages or first looks at its timers.
        """
        if self._pauses_left and self.alive and self._queue.clock.now > 0.5 and self._queue.chance(0.04):
            self._pauses_left -= 1
            seconds = self._queue.random.uniform(1.5, 4.5)
            self._resumes_at = self._queue.clock.now + seconds
            self._ticks_late_s = self._queue.random.choice([0.0, TICK_S])
            self._queue.note(f"the router pauses for {seconds:.1f} s")

    def _put_off(self, action: Action, late_s: float = 0.0) -> bool:
        """Plans an action for `late_s` after the end of the pause. Returns False if there is no pause. Actions that
        were put off happen in the order in which they were.
        """
        if self._queue.clock.now >= self._resumes_at:
            return False
        self._queue.at_time(self._resumes_at + late_s, action)
        return True

    # ---- the administrator

    def set_drained(self, name: str, drained: bool) -> bool:
        """Drains an engine, or takes that back. Returns False if the router does not hear it, or knows no such engine.
        It keeps to the order from now on, also in its next lives.
        """
        if not self.alive or self._queue.clock.now < self._resumes_at:
            return False
        try:
            self.router.set_drained(name, drained)
        except NotFound:
            return False
        self._queue.note(f"order: {'drain' if drained else 'undrain'} {name}")
        (self.drained.add if drained else self.drained.discard)(name)
        self.flush()
        return True

    # ---- clients

    def submit(self, client: Client) -> None:
        if self.doors is not None:
            self.doors.submit(client, self._buffers.get(client.name))
            return
        if self._put_off(partial(self.submit, client)):
            return
        name = client.request.request_id
        if not self.alive:
            self._refused(client, RequestFailed("the router is down"))
            return
        self._submitted.add(name)
        try:
            self.router.submit(client.request)
        except RequestError as error:
            self._refused(client, error)
        else:
            if self._audit is not None:
                self._audit.router.accepted(client)
            if client.cancel_after_s is not None:
                self._queue.at(client.cancel_after_s, partial(self.cancel, client, "cancel"))
        self.flush()

    def cancel(self, client: Client, why: str) -> None:
        if self._put_off(partial(self.cancel, client, why)):
            return
        name = client.request.request_id
        if client.closed or not self.alive:
            return
        self._queue.num_faults += 1
        self._queue.note(f"{why} {name} after {len(client.received)} tokens")
        self.router.cancel(name)
        self.flush()

    def _refused(self, client: Client, error: RequestError) -> None:
        client.refused = error
        self.open.discard(client.request.request_id)
        self._queue.note(f"refused {client.request.request_id}: {error}")
        if self._audit is not None:
            self._audit.router.refused(client, error)

    def _took(self, event: Delivered) -> None:
        """Does what the front door does with tokens: they wait if their client does not take them at once."""
        self._check_open(event, event.request_ids)
        clients, now = self.clients, self._queue.clock.now
        if not event.counts:  # nearly always so: a run without invariants spends most of its own time here
            for name, token_id in zip(event.request_ids, event.token_ids, strict=True):
                client = clients[name]
                client.received.append(token_id)
                client.received_at.append(now)
        else:
            for name, new in event.rows():
                client = clients[name]
                client.received += new
                client.received_at += [now] * len(new)
        for name, logprobs in event.logprobs.items():
            clients[name].logprobs += logprobs
        if self._buffers:
            for name in filter(self._buffers.__contains__, event.request_ids):
                self._keep(clients[name], self._buffers[name])
        if self._audit is not None:
            self.heard.update(event.request_ids)

    def _keep(self, client: Client, buffer: Buffer) -> None:
        """The tokens that a client does not take wait in its buffer."""
        name, num_before = client.request.request_id, len(buffer)
        overflows = buffer.push(client.received[(client.stops_after or 0) + num_before :])
        if len(buffer) and not num_before:
            self._queue.at(self._scenario.router.write_timeout_s, partial(self.cancel, client, "write timeout of"))
        if overflows:
            self._queue.num_faults += 1
            self._queue.note(f"{name} does not read: {len(buffer)} tokens wait for it")
            self.router.cancel(name)

    def _ended(self, event: Ended) -> None:
        self._check_open(event, [event.request_id])
        client, buffer = self.clients[event.request_id], self._buffers.get(event.request_id)
        if self._audit is not None:
            self.heard.add(event.request_id)
            self._audit.router.ended(client, event, len(client.received))
        client.ended = event if buffer is None else buffer.end(event)
        self.open.discard(event.request_id)
        self._queue.note(f"ended {event.request_id}: {client.ended.finish_reason or client.ended.error}")

    def _check_open(self, event: Delivered | Ended, names: list[str]) -> None:
        if not self.open.issuperset(names):
            raise self.violation(f"I13: {event} after the terminal event")

    def violation(self, text: str) -> Violation:
        return Violation(self._scenario.seed, self._queue.clock.now, text)

    # ---- doors in processes of their own

    def door_up(self, connection: Connection) -> None:
        if self._reached(connection) and not self._put_off(partial(self.door_up, connection)):
            assert self._far is not None
            self._far.door_up(connection)
            self.flush()

    def door_says(self, connection: Connection, message: DoorMessage) -> None:
        if self._reached(connection) and not self._put_off(partial(self.door_says, connection, message)):
            assert self._far is not None
            self._far.take(connection, message)
            self.flush()

    def door_gone(self, connection: Connection) -> None:
        if self._reached(connection) and not self._put_off(partial(self.door_gone, connection)):
            assert self._far is not None
            self._far.door_gone(connection)
            self.flush()
            self._far.check_gone(connection)

    def _reached(self, connection: Connection) -> bool:
        """What is sent to a dead process reaches nobody."""
        return self.alive and connection.core == self.router.address

    # ---- the loop

    def flush(self) -> None:
        """Sends messages and events that the router has put out, until there are none: handling one can make others."""
        self.touched = True
        router = self.router
        if self._far is not None:
            while self._far.turn(self._send):
                continue
            return
        while router.outbox or router.events:
            outbox, events = router.outbox[:], router.events[:]
            router.outbox.clear()
            router.events.clear()
            for receiver, message in outbox:
                self._send(receiver, message)
            for event in events:
                if isinstance(event, Delivered):
                    self._took(event)
                else:
                    self._ended(event)

    def _send(self, receiver: Address, message: Message) -> None:
        envelope = self._outgoing.envelope(receiver, message)
        if isinstance(message, EngineRequest) and receiver.replica_id in self.drained:
            raise self.violation(f"I17: {message.key.request_id} goes to {receiver.replica_id}, which is drained")
        if self._audit is not None:
            self._audit.router_says(envelope)
        self._wire.send(envelope)

    def _tick(self, router: Router) -> None:
        if router is not self.router or not self.alive:
            return
        if self._put_off(partial(self._tick, router), self._ticks_late_s):
            return
        router.tick()
        if self._far is not None:
            self._far.doors.tick()
        for lost in self._incoming.lost():
            router.replica_lost(lost)
        self.lost.update(router.lost)
        router.lost.clear()
        self.flush()
        if self._audit is not None:
            self._audit.router.ticked()
        self._queue.at(TICK_S, partial(self._tick, router))

    def _arrived(self, envelope: Envelope) -> None:
        if not self.alive or self._put_off(partial(self._arrived, envelope)):
            return
        for ready in self._incoming.accept(envelope):
            if self._queue.logged:
                self._queue.note(text(ready))
            if self._audit is not None:
                self._audit.router.hears(ready)
            self.router.handle(ready)
            if self._audit is not None:
                self._audit.router.heard(ready)
            self.flush()
