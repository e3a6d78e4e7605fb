"""Drives the core and its doors on an event loop: after every input it sends what they have put out.

A door of the same process reaches the core by `OwnLink`: its messages and batches are direct calls.
"""

import asyncio
from collections.abc import Callable

from protocol.clock import Clock
from protocol.messages import ROUTER_ID, Address, Envelope, Message
from router.config import RouterConfig
from router.door_link import DoorEnd
from router.door_messages import Batch, DoorMessage
from router.doors import Core, Doors

OWN_DOOR = Address(ROUTER_ID, 0)
"""The door in the core's own process."""


class CoreLoop:
    """All methods belong to one event loop, so the core needs no lock. `send` takes messages to engines."""

    def __init__(
        self, core: Core, config: RouterConfig, *, send: Callable[[Address, Message], None], clock: Clock
    ) -> None:
        self.core = core
        self.doors = Doors(core, config, clock)
        self._send, self._tick_interval_s = send, config.tick_interval_s
        self._receive: dict[Address, Callable[[Batch], None]] = {}
        self._pumping = False

    async def run(self) -> None:
        """Ticks until it is cancelled. Anything it raises is a bug in the core."""
        while True:
            self.core.tick()
            self.doors.tick()
            self.pump()
            await asyncio.sleep(self._tick_interval_s)

    def deliver(self, envelope: Envelope) -> None:
        """Takes one message of an engine. Messages come in the order of their numbers."""
        self.core.handle(envelope)
        self.pump()

    def connect(self, door: Address, receive: Callable[[Batch], None]) -> None:
        """Takes note of a door that has started. `receive` gets its batches."""
        self._receive[door] = receive
        self.doors.door_up(door)
        self.pump()

    def disconnect(self, door: Address) -> None:
        """Takes note that a door is gone, with all that its clients wait for."""
        self.doors.door_down(door)
        self.pump()
        del self._receive[door]

    def take(self, door: Address, message: DoorMessage) -> None:
        """Takes one message of a door. Messages come in the order in which they were sent."""
        self.doors.take(door, message)
        self.pump()

    def drain(self, deadline_s: float) -> None:
        """Accepts nothing new. What is still open in `deadline_s` seconds ends with an error."""
        self.core.drain(deadline_s)
        self.pump()

    def pump(self) -> None:
        """Sends what the core has put out. Whoever gives the core an input calls this directly afterwards."""
        if self._pumping:  # a door has answered within its call; the loop below goes on with that
            return
        self._pumping = True
        try:
            while self._send_all():
                continue
        finally:
            self._pumping = False

    def _send_all(self) -> bool:
        """Returns whether there was anything."""
        self.doors.collect()
        outbox, batches = self.core.outbox[:], self.doors.outbox[:]
        self.core.outbox.clear()
        self.doors.outbox.clear()
        for address, message in outbox:
            self._send(address, message)
        for door, batch in batches:
            self._receive[door](batch)
        return bool(outbox or batches)


class OwnLink:
    """A `CoreLink` within one process."""

    def __init__(self, core: CoreLoop) -> None:
        self._core = core

    def connect(self, door: DoorEnd) -> None:
        door.up()
        self._core.connect(OWN_DOOR, door.receive)

    def send(self, message: DoorMessage) -> None:
        self._core.take(OWN_DOOR, message)
