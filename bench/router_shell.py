"""The router of a simulated run, one life after another, and the clients at its door."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat

from bench.heap import Heap
from bench.ledger import Ledger
from bench.scenario import Client, Scenario
from bench.violation import Violation
from bench.wire import Wire, text
from protocol.delivery import Incoming, Outgoing
from protocol.errors import RequestCancelled, RequestError, RequestFailed
from protocol.messages import ROUTER_ID, Address, Envelope
from router.request import Ended, Tokens
from router.router import Router

TICK_S = 0.1


class RouterShell:
    """Owns the router's core, as `router/actor.py` and the front doors do. `engines()`: addresses of those that live."""

    def __init__(self, heap: Heap, scenario: Scenario, wire: Wire, epochs: Iterator[int], ledger: Ledger | None) -> None:
        self._heap, self._scenario, self._wire, self._epochs, self._ledger = heap, scenario, wire, epochs, ledger
        self.clients = {client.request.request_id: client for client in scenario.clients}
        self.open = set(self.clients)
        """Clients whose end is still to come."""
        self.heard: set[str] = set()
        """Clients that got something since the invariants looked last."""
        self.lost: set[Address] = set()
        """Engines that the router has given up: to be ended."""
        self.touched = True
        """Something came to the router since the invariants looked last."""
        self._submitted: set[str] = set()
        self._kills_left = scenario.faults.router_kills
        self.start(())

    def start(self, engines: Iterable[Address]) -> None:
        """A router with an empty table and a new epoch; the supervisor tells it which engines live."""
        address = Address(ROUTER_ID, next(self._epochs))
        self.router = Router(self._scenario.router, address=address, clock=self._heap.clock, seed=self._scenario.seed)
        self._incoming, self._outgoing = Incoming(address, self._heap.clock), Outgoing(address)
        self.alive = True
        self._wire.inlets[ROUTER_ID] = self._arrived
        if self._ledger is not None:
            self._ledger.router_starts(self.router)
        self._heap.note(f"start router epoch {address.epoch}")
        for engine in engines:
            self.router.replica_started(engine)
        self.flush()
        self._tick(self.router)

    def dies(self) -> bool:
        """Drawn at every look of the supervisor."""
        if self._kills_left and self.alive and self._heap.clock.now > 0.5 and self._heap.chance(0.008):
            self._kills_left -= 1
            return True
        return False

    def kill(self) -> None:
        self._heap.note("kill router")
        self.alive = False
        del self._wire.inlets[ROUTER_ID]
        self._wire.cut_off(self._outgoing)
        if self._ledger is not None:
            self._ledger.router.check()
        for name in self.open & self._submitted:
            self.clients[name].lost = True
            self.open.discard(name)

    # ---- clients

    def submit(self, client: Client) -> None:
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
            if self._ledger is not None:
                self._ledger.router.accepted(client)
            if client.cancel_after_s is not None:
                self._heap.at(client.cancel_after_s, partial(self.cancel, client, "cancel"))
        self.flush()

    def cancel(self, client: Client, why: str) -> None:
        name = client.request.request_id
        if client.closed or not self.alive:
            return
        self._heap.num_faults += 1
        self._heap.note(f"{why} {name} after {len(client.received)} tokens")
        self.router.cancel(name)
        self.flush()

    def _refused(self, client: Client, error: RequestError) -> None:
        client.refused = error
        self.open.discard(client.request.request_id)
        self._heap.note(f"refused {client.request.request_id}: {error}")
        if self._ledger is not None:
            self._ledger.router.refused(client, error)

    def _took(self, client: Client, event: Tokens) -> None:
        """What the front door does with tokens: they wait for the client, at most `max_buffered_tokens` of them."""
        new = event.token_ids
        client.received += new
        client.received_at += repeat(self._heap.clock.now, len(new))
        if event.logprobs:
            client.logprobs += event.logprobs
        if client.stops_after is not None and len(client.received) > client.stops_after and not client.overflown:
            self._keep(client, event)

    def _keep(self, client: Client, event: Tokens) -> None:
        """Tokens that their client does not take."""
        config = self._scenario.router
        assert client.stops_after is not None
        num_waiting = len(client.received) - client.stops_after
        if num_waiting > config.max_buffered_tokens:
            client.overflown = True
            self._heap.num_faults += 1
            self._heap.note(f"{event.request_id} does not read: {num_waiting} tokens wait for it")
            self.router.cancel(event.request_id)
        elif num_waiting <= len(event.token_ids):
            self._heap.at(config.write_timeout_s, partial(self.cancel, client, "write timeout of"))

    def _ended(self, client: Client, event: Ended) -> None:
        if client.overflown:
            event = event._replace(finish_reason=None, error=RequestCancelled("the client reads too slowly"))
        client.ended = event
        self.open.discard(event.request_id)
        self._heap.note(f"ended {event.request_id}: {event.finish_reason or event.error}")

    # ---- the loop

    def flush(self) -> None:
        """Carries off what the router has put out. Cancelling an answer that has grown too long fills it again."""
        self.touched = True
        router = self.router
        while router.outbox or router.events:
            outbox, events = router.outbox[:], router.events[:]
            router.outbox.clear()
            router.events.clear()
            for receiver, message in outbox:
                envelope = self._outgoing.envelope(receiver, message)
                if self._ledger is not None:
                    self._ledger.router_says(envelope)
                self._wire.send(envelope)
            if self._ledger is not None:
                self.heard.update(event.request_id for event in events)
            for event in events:
                name = event.request_id
                client = self.clients[name]
                if name not in self.open:
                    raise Violation(self._scenario.seed, self._heap.clock.now, f"I13: {event} after the terminal event")
                if isinstance(event, Tokens):
                    self._took(client, event)
                    continue
                if self._ledger is not None:
                    self._ledger.router.ended(client, event)
                self._ended(client, event)

    def _tick(self, router: Router) -> None:
        if router is not self.router or not self.alive:
            return
        router.tick()
        for lost in self._incoming.lost():
            router.replica_lost(lost)
        self.lost.update(router.lost)
        router.lost.clear()
        self.flush()
        if self._ledger is not None:
            self._ledger.router.ticked()
        self._heap.at(TICK_S, partial(self._tick, router))

    def _arrived(self, envelope: Envelope) -> None:
        for ready in self._incoming.accept(envelope):
            if self._heap.logged:
                self._heap.note(text(ready))
            if self._ledger is not None:
                self._ledger.router.hears(ready)
            self.router.handle(ready)
            self.flush()
