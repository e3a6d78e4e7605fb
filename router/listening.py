"""The ports of one process, and the core if it lives there, from the first connection to the last answer."""

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from protocol.errors import CapacityError
from router.core_loop import CoreLoop

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
    """All methods belong to one event loop. `stop` may be called once `start` has returned. `core`: None if it lives in
    another process.
    """

    def __init__(self, listeners: Sequence[Listener], tick_interval_s: float, core: CoreLoop | None = None) -> None:
        self._listeners, self._tick_interval_s, self._core = listeners, tick_interval_s, core
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
        core = [self._core.run()] if self._core is not None else []
        self._running = asyncio.gather(*core, *(listener.run() for listener in self._listeners))
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
        """Accepts nothing new. What is open in `grace_s` seconds ends with an error of the core."""
        assert self._running is not None
        if self._core is not None:
            self._core.drain(grace_s)
        until_s = grace_s + FLUSH_TICKS * self._tick_interval_s
        await asyncio.gather(*(listener.stop(until_s) for listener in self._listeners))
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def failure_of(serving: "asyncio.Future[Any] | None") -> str:
    """Returns why a process can no longer serve, or "" while it can, or has not begun."""
    if serving is None or not serving.done():
        return ""
    error = serving.exception()
    return "".join(traceback.format_exception(error)) if error else "its server has stopped"
