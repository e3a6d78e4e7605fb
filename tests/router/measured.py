"""A router, its front door, and the samples that Prometheus would see."""

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protocol.histogram import Histogram
from protocol.messages import Address, ReplicaStatus
from router.call_request import CallRequest, Prompt, SamplingOptions
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.frontdoor import FrontDoor, Model
from router.metrics import PREFIX
from router.metrics_collector import RouterCollector
from router.tokenizer import NumberTokenizer
from tests.router.router_world import D, World


class Measured(World):
    """Adds a front door and a collector. `value` reads one sample of what Prometheus would see."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        loop = CoreLoop(self.router, RouterConfig(), send=lambda address, message: None, clock=self.clock)
        self.pump = loop.pump
        self.door = FrontDoor(
            OwnLink(loop),
            NumberTokenizer(100),
            RouterConfig(),
            Model("m", 100),
            clock=self.clock,
            totals=loop.doors.totals,
        )
        self.collector = RouterCollector(self.router, loop.doors.totals, "m")

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        registry = CollectorRegistry()
        registry.register(self.collector)
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((PREFIX + name, frozenset({"model_name": "m", **labels}.items())))

    def answer(self, *steps: Callable[[], None], max_tokens: int = 5) -> None:
        """Runs one call to its end. Once an engine has it, the steps follow one another."""
        asked = CallRequest(prompt=Prompt(text="<7> <8> <9>"), sampling=SamplingOptions(max_tokens=max_tokens))

        async def read() -> None:
            async for _ in self.door.generate(lambda: asked, deadline_s=None):
                continue

        async def main() -> None:
            reading = asyncio.create_task(read())
            while not self.router.active():
                await asyncio.sleep(0)
            for step in steps:
                step()
                self.pump()
            await reading

        asyncio.run(asyncio.wait_for(main(), 30))

    def status(
        self, address: Address, *, steps: int = 0, step_s: float = 0.25, num_free: int = 90, **counters: float
    ) -> None:
        histogram = Histogram((0.1, 1.0))
        histogram.observe(step_s, steps)
        self.say(
            address,
            ReplicaStatus(
                state="up",
                seq=1,
                num_waiting=2,
                num_running=3,
                num_leases=4,
                num_pulls=5,
                num_early_handoffs=6,
                num_free_blocks=num_free,
                num_cached_blocks=20,
                num_held_blocks=1,
                thrash_ratio=0.5,
                transport="shared_memory" if address == D else "",
                counters=counters,
                distributions={"step_seconds": histogram.now},
            ),
        )
