"""The router as one process: the core on an event loop, with a front door unless doors have processes of their own.

The class is plain; the composition root makes it a Ray actor. It is asynchronous because it serves its own sockets. Ray
does not keep the order of calls on such actors, so `protocol.delivery` restores it.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from protocol import start_times  # first, because it notes when imports began

# isort: split
from protocol.delivery import Incoming, Outgoing
from protocol.errors import startup_errors
from protocol.log import LogLevel, configure, set_level
from protocol.messages import ROUTER_ID, Address, Envelope, Message
from router.admin import Admin, Orders
from router.config import Ports, RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.door_socket import CoreSocket, socket_name
from router.frontdoor import FrontDoor
from router.listeners import Listeners
from router.listening import Listening, failure_of
from router.make_door import make_door, model_name
from router.metrics_collector import RouterCollector
from router.policy import ReplicaView
from router.router import Router

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that tokenises may keep the interpreter from the event loop. Python's default is 5 ms, which every
message might have to wait.
"""
STOP_GRACE_S = 1.0
"""How long open calls may go on reading their answers when the server stops."""

log = logging.getLogger(__name__)


class RouterActor:
    """If `model_dir` is None, prompts and answers are numbers instead of text. `send` must not block.
    `socket_prefix` begins the name of the socket where doors of other processes reach the core.
    """

    def __init__(
        self,
        address: Address,
        log_level: LogLevel,
        config: RouterConfig,
        model_dir: Path | None,
        vocab_size: int,
        socket_prefix: str,
        send: Callable[[Envelope], None],
    ) -> None:
        start_times.note_imports()
        configure(log_level, address)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._config = config
        self._incoming, self._outgoing = Incoming(address, time.monotonic), Outgoing(address)
        self._send = send
        self._core = Router(config, address=address, clock=time.monotonic, seed=time.time_ns())
        self._loop = CoreLoop(self._core, config, send=self._post, clock=time.monotonic)
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._inbox: asyncio.Queue[Envelope] = asyncio.Queue()
        self._socket = CoreSocket(self._loop, socket_name(socket_prefix, address))
        self._admin = Admin(self._core, pump=self._loop.pump, doors=lambda: self._socket.doors, clock=time.monotonic)
        self._door: FrontDoor | None = None
        self._serving: asyncio.Future[tuple[None, None, None]] | None = None

    async def start(self) -> Ports:
        """Starts to listen, and loads the tokenizer if it is a door. Raises StartupError, whatever happened."""
        with startup_errors(ROUTER_ID):
            return await self._start()

    async def _start(self) -> Ports:
        config, parts, totals = self._config, Listeners(self._config), self._loop.doors.totals
        collector = RouterCollector(self._core, totals, model_name(self._model_dir))
        listeners = parts.of_core(collector, self._admin)
        if not config.doors:
            self._door = make_door(OwnLink(self._loop), config, self._model_dir, self._vocab_size, totals)
            listeners |= parts.of_door(self._door, collector)
        self._listening = Listening(list(listeners.values()), config.tick_interval_s, self._loop)
        with start_times.phase("ports"):
            if config.doors:
                await self._socket.start()
            opened = await self._listening.start()
        ports = config.ports._replace(**dict(zip(listeners, opened, strict=True)))
        self._serving = asyncio.gather(self._listening.wait(), self._receive(), self._socket.run())
        log.info("started", extra={"pid": os.getpid(), **ports._asdict()})
        return ports

    async def pid(self) -> int:
        return os.getpid()

    async def start_times(self) -> list[start_times.Phase]:
        """Returns what this process did when while it started."""
        return start_times.phases()

    async def deliver(self, envelope: Envelope) -> None:
        self._inbox.put_nowait(envelope)

    async def replica_started(self, address: Address) -> None:
        """Takes note of an engine that the supervisor has started. The core's next tick greets it."""
        self._core.replica_started(address)

    async def replica_down(self, address: Address) -> None:
        """Takes note that an engine's process is gone."""
        self._incoming.forget(address)
        self._core.replica_down(address)

    async def failure(self) -> str:
        """Returns why the router can no longer work, or "" while it can."""
        return failure_of(self._serving)

    async def take_lost(self) -> list[Address]:
        """Returns the engines to be ended because their messages have a lasting gap. Each is named once."""
        for address in self._incoming.lost():
            self._core.replica_lost(address)
        lost, self._core.lost = self._core.lost, []
        return lost

    async def orders(self) -> Orders:
        """Returns what administrators have ordered, for the supervisor to keep."""
        return self._admin.orders

    async def restore(self, orders: Orders) -> None:
        """Takes over the orders that the router before this one had. Called before it hears of any engine."""
        self._admin.restore(orders)

    async def set_log_level(self, level: LogLevel) -> None:
        set_level(level)

    async def ready(self) -> bool:
        return self._core.ready

    async def doors(self) -> list[str]:
        """Returns the names of the doors in other processes that are connected."""
        return self._socket.doors

    async def loads(self) -> list[ReplicaView]:
        """Returns what is known of every engine, its last status included."""
        return list(self._core.replicas())

    async def drain(self, deadline_s: float) -> None:
        """Takes no new requests. Those still open in `deadline_s` seconds end with an error."""
        log.info("drains", extra={"deadline_s": deadline_s, "num_open": self._core.num_open})
        self._core.drain(deadline_s)

    async def num_open(self) -> int:
        return self._core.num_open

    async def num_cut_short(self) -> int:
        """Returns how many requests the drain's deadline has ended."""
        return self._core.num_cut_short

    async def stop(self) -> None:
        """Closes the ports and ends open calls."""
        if self._serving is not None:
            log.info("stops", extra={"num_open": self._core.num_open})
            await self._listening.stop(STOP_GRACE_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            await self._socket.stop()
            if self._door is not None:
                await self._door.close()

    async def _receive(self) -> None:
        """Hands messages on in order. Anything it raises is a bug in the core, which `failure` then reports. An error
        raised in `deliver` would reach nobody.
        """
        while True:
            for envelope in self._incoming.accept(await self._inbox.get()):
                self._loop.deliver(envelope)

    def _post(self, receiver: Address, message: Message) -> None:
        self._send(self._outgoing.envelope(receiver, message))
