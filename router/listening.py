"""A front door and the listeners in front of it, from the first connection to the last answer."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from protocol.errors import CapacityError
from router.frontdoor import FrontDoor

FLUSH_TICKS = 10
"""How many ticks the core's last errors get to reach their clients before the listeners close."""


class Listener(Protocol):
    """One dialect on one port."""

    async def start(self) -> int:
        """Returns the port. Raises CapacityError if it is taken."""
        ...

    async def run(self) -> None:
        """Serves until it is cancelled. Anything it raises is a bug."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing new. What is open in `grace_s` seconds is cut off."""
        ...


class Listening:
    """All methods belong to one event loop. `stop` may be called once `start` has returned."""

    def __init__(self, door: FrontDoor, listeners: Sequence[Listener], tick_interval_s: float) -> None:
        self._door, self._listeners, self._tick_interval_s = door, listeners, tick_interval_s
        self._running: asyncio.Future[list[None]] | None = None

    async def start(self) -> list[int]:
        """Returns the ports in the order of the listeners. Raises CapacityError if one is taken; then none is open."""
        ports: list[int] = []
        try:
            for listener in self._listeners:
                ports.append(await listener.start())
        except CapacityError:
            await asyncio.gather(*(listener.stop(0.0) for listener in self._listeners[: len(ports)]))
            raise
        self._running = asyncio.gather(self._door.run(), *(listener.run() for listener in self._listeners))
        return ports

    async def wait(self) -> None:
        """Returns after `stop`. Raises whatever error broke the core or a listener; such an error is a bug."""
        assert self._running is not None
        try:
            await asyncio.shield(self._running)
        except asyncio.CancelledError:
            if not self._running.done():
                raise  # not the listeners were cancelled, but who waits for them

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing new, gives open answers `grace_s` seconds to end, and then ends them with an error."""
        assert self._running is not None
        self._door.drain(grace_s)
        until_s = grace_s + FLUSH_TICKS * self._tick_interval_s
        await asyncio.gather(*(listener.stop(until_s) for listener in self._listeners))
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._door.close()
