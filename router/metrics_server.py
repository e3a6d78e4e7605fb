"""The port that Prometheus scrapes. A thread serves HTTP; the numbers are read on the event loop that changes them."""

import asyncio
from collections.abc import Iterable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.errors import CapacityError
from router.config import RouterConfig

SCRAPE_TIMEOUT_S = 10.0
"""The longest wait for a busy or stopping event loop; the same as Prometheus's own default."""


class MetricsServer:
    """Listens from `start` to `stop`, both called on the event loop that `collector` belongs to."""

    def __init__(self, collector: Collector, config: RouterConfig) -> None:
        self._collector, self._config = collector, config
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def start(self) -> int:
        """Returns the port. Raises CapacityError if it is taken."""
        host, port = self._config.metrics_host, self._config.metrics_port
        try:
            self._server, self._thread = start_http_server(
                port, host, registry=_OnLoop(self._collector, asyncio.get_running_loop())
            )
        except OSError as error:
            shown = f"[{host}]" if ":" in host else host
            raise CapacityError(f"metrics_port: {shown}:{port} is taken, or not an address of this machine") from error
        return int(self._server.server_port)

    async def stop(self) -> None:
        """Closes the port. Scrapes under way end on their own."""
        if self._server is not None and self._thread is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.socket.close()
            self._thread.join()


class _OnLoop(Collector):
    """Lets any thread but the event loop's own call `collect`, which then runs on the loop."""

    def __init__(self, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self._collector, self._loop = collector, loop

    def collect(self) -> Iterable[Family]:
        async def collect() -> list[Family]:
            return list(self._collector.collect())

        return asyncio.run_coroutine_threadsafe(collect(), self._loop).result(SCRAPE_TIMEOUT_S)
