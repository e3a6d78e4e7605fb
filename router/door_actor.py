"""A door as one process of its own: its listeners and the way to the core on one event loop.

The class is plain; the composition root makes it a Ray actor. It outlives a router that dies: its calls end with an
error, and it serves the next router as soon as its supervisor names that one.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

from protocol import start_times  # first, because it notes when imports began

# isort: split
from protocol.errors import startup_errors
from protocol.log import LogLevel, configure, set_level
from protocol.messages import Address
from router.actor import STOP_GRACE_S, SWITCH_INTERVAL_S
from router.config import Ports, RouterConfig
from router.door_socket import FarLink
from router.listeners import Listeners
from router.listening import Listening, failure_of
from router.make_door import make_door
from router.metrics_totals import DoorTotals

log = logging.getLogger(__name__)


class DoorActor:
    """`config` has the ports that all doors share. If `model_dir` is None, prompts and answers are numbers.
    `socket_prefix` begins the name of the core's socket.
    """

    def __init__(
        self,
        address: Address,
        log_level: LogLevel,
        config: RouterConfig,
        model_dir: Path | None,
        vocab_size: int,
        socket_prefix: str,
    ) -> None:
        start_times.note_imports()
        configure(log_level, address)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._name, self._config = address.replica_id, config
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._link = FarLink(address.replica_id, socket_prefix)
        self._serving: asyncio.Future[tuple[None, None, None]] | None = None

    async def start(self) -> Ports:
        """Loads the tokenizer and starts to listen. Raises StartupError, whatever happened."""
        with startup_errors(self._name):
            return await self._start()

    async def _start(self) -> Ports:
        self._door = make_door(self._link, self._config, self._model_dir, self._vocab_size, DoorTotals())
        listeners = Listeners(self._config).of_door(self._door, None)
        self._listening = Listening(list(listeners.values()), self._config.tick_interval_s)
        with start_times.phase("ports"):
            opened = await self._listening.start()
        self._serving = asyncio.gather(self._listening.wait(), self._link.run(), self._report())
        log.info("started", extra={"pid": os.getpid()})
        return self._config.ports._replace(**dict(zip(listeners, opened, strict=True)))

    async def pid(self) -> int:
        return os.getpid()

    async def start_times(self) -> list[start_times.Phase]:
        """Returns what this process did when while it started."""
        return start_times.phases()

    async def core_up(self, core: Address) -> None:
        """Takes note of a router that has started."""
        self._link.core_up(core)

    async def set_log_level(self, level: LogLevel) -> None:
        set_level(level)

    async def failure(self) -> str:
        """Returns why the door can no longer work, or "" while it can."""
        return failure_of(self._serving)

    async def stop(self) -> None:
        """Closes the ports. The router ends the calls that are still open."""
        if self._serving is not None:
            log.info("stops", extra={"num_open": self._door.num_open})
            await self._listening.stop(STOP_GRACE_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            await self._door.close()

    async def _report(self) -> None:
        while True:
            self._door.report()
            await asyncio.sleep(self._config.tick_interval_s)
