"""The port that Prometheus scrapes."""

import asyncio
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.registry import Collector

from protocol.errors import CapacityError
from router.config import RouterConfig
from router.http_server import HttpServer
from router.metrics_server import metrics_server
from tests.hang import HANG_S
from tests.router.measured import Measured


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S) as response:
        text: str = response.read().decode()
        return text


def served(collector: Collector, **config: Any) -> HttpServer:
    return metrics_server(collector, RouterConfig(**({"metrics_port": 0} | config)))


def test_a_scrape_reads_on_the_event_loop_and_stop_frees_the_port() -> None:
    async def main() -> int:
        server = served(Measured().collector)
        port = await server.start()
        assert "twopass_requests_accepted_total" in await asyncio.to_thread(fetch, port)
        await server.stop(0.0)
        return port

    port = asyncio.run(main())
    with pytest.raises(urllib.error.URLError):
        fetch(port)
    socket.create_server(("127.0.0.1", port), reuse_port=False).close()


def test_a_taken_port_is_an_error_that_names_the_knob() -> None:
    async def main(port: int) -> None:
        with pytest.raises(CapacityError, match=f"metrics_port: 127.0.0.1:{port} is taken"):
            await served(Measured().collector, metrics_port=port).start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(main(taken.getsockname()[1]))
