"""One HTTP port: an ASGI application served by uvicorn on the event loop that the rest of the router runs on."""

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from protocol.errors import CapacityError
from router.http_protocol import TimedProtocol
from router.tls import Certificates

BACKLOG = 2048
"""Connections that wait to be accepted."""
KEEP_ALIVE_S = 10
"""How long a connection may stay open between two requests."""


class HttpServer:
    """A `Listener`. `knob` begins the names of its host and port in RouterConfig. A client that takes longer than
    `read_timeout_s` for a handshake or a request is cut off; one that takes nothing for `write_timeout_s` is, by the
    kernel. `share_port`: the other doors of this machine listen on it, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        knob: str,
        host: str,
        port: int,
        *,
        read_timeout_s: float,
        write_timeout_s: float,
        certificates: Certificates | None = None,
        share_port: bool = False,
    ) -> None:
        self._share_port = share_port
        self._knob, self._host, self._port, self._write_timeout_s = knob, host, port, write_timeout_s
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        if certificates is not None:
            config.ssl = certificates.context()
        self._server = _Server(config, read_timeout_s)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self._host, self._port), family=family, backlog=BACKLOG, reuse_port=self._share_port
            )
        except OSError as error:
            shown = f"[{self._host}]" if ":" in self._host else self._host
            raise CapacityError(
                f"{self._knob}_port: {shown}:{self._port} is taken, or not an address of this machine"
            ) from error
        # Accepted sockets inherit both. Without the first an answer waits 40 ms for its client's delayed ACK: asyncio
        # sets it only on sockets that were made for TCP by name.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout_ms = math.ceil(1000 * self._write_timeout_s)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        await self._server.up.wait()
        return int(listening.getsockname()[1])

    async def run(self) -> None:
        assert self._serving is not None
        await asyncio.shield(self._serving)

    async def stop(self, grace_s: float) -> None:
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _Server(uvicorn.Server):
    """Signals are the process's own business, reading has a limit, and `up` is set once it listens."""

    def __init__(self, config: uvicorn.Config, read_timeout_s: float) -> None:
        super().__init__(config)
        self._read_timeout_s = read_timeout_s
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, which would leave a TLS handshake asyncio's minute."""
        config, read_timeout_s = self.config, self._read_timeout_s
        connection = partial(
            TimedProtocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            read_timeout_s=read_timeout_s,
        )
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection,
                sock=sock,
                ssl=config.ssl,
                ssl_handshake_timeout=read_timeout_s if config.ssl is not None else None,
                backlog=BACKLOG,
            )
            for sock in sockets or []
        ]
        self.started = True
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
