"""An HTTP door in front of a scripted core, on a port that the system chooses."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client.registry import CollectorRegistry

from router.admin import Admin
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.frontdoor import FrontDoor, Model
from router.listeners import Listeners
from router.listening import Listening
from router.tokenizer import NumberTokenizer, Tokenizer
from tests.hang import HANG_S
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving

MODEL = "arithmetic"


@asynccontextmanager
async def http_serving(core: ScriptedCore, tokenizer: Tokenizer | None = None, **knobs: Any) -> AsyncIterator[Serving]:
    config = RouterConfig(**{"grpc_port": 0, "http_port": 0, "metrics_port": 0, **knobs})
    loop = CoreLoop(core, config, send=lambda address, message: None, clock=time.monotonic)
    door = FrontDoor(
        OwnLink(loop),
        tokenizer or NumberTokenizer(VOCAB_SIZE),
        config,
        Model(MODEL, VOCAB_SIZE),
        clock=time.monotonic,
        totals=loop.doors.totals,
    )
    collector, parts = CollectorRegistry(), Listeners(config)
    admin = Admin(core, pump=loop.pump, doors=lambda: ["door-0"], clock=time.monotonic)
    listeners = parts.of_door(door, collector) | parts.of_core(collector, admin)
    server = Listening(list(listeners.values()), config.tick_interval_s, loop)
    ports = dict(zip(listeners, await server.start(), strict=True))
    try:
        yield Serving(loop, door, server, f"http://127.0.0.1:{ports['http_port']}", [], ports)
    finally:
        await server.stop(0.0)
        await door.close()


def http_scenario(
    test: Callable[[Serving, httpx.AsyncClient], Awaitable[None]],
    core: ScriptedCore | None = None,
    tokenizer: Tokenizer | None = None,
    **knobs: Any,
) -> None:
    """Runs `test` against a door around `core`, with a client that has its address."""

    async def main() -> None:
        async with (
            http_serving(core or ScriptedCore(), tokenizer, **knobs) as served,
            httpx.AsyncClient(base_url=served.address, timeout=HANG_S, trust_env=False) as client,
        ):
            await test(served, client)

    asyncio.run(asyncio.wait_for(main(), HANG_S))
