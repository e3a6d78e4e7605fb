"""Starts, ends and replaces the processes of a simulated run, as `cluster/serve.py` does for real ones, and draws what
happens to them.
"""

import random
from collections import Counter
from functools import partial
from typing import get_args

from protocol.messages import Drain, Envelope, PoolName
from simulator.engines import Engines
from simulator.event_queue import EventQueue
from simulator.replica import Replica
from simulator.router_driver import TICK_S, RouterDriver
from simulator.scenario import Scenario

MEMORY_RETRY_S = 0.5
"""Between two attempts of a successor to start where others still map its predecessor's memory."""
CALM_S = 0.5
"""Virtual seconds before which nothing happens to a process."""


class Supervisor:
    """Looks at every process every `TICK_S`, and draws what happens to it."""

    def __init__(self, queue: EventQueue, scenario: Scenario, driver: RouterDriver, engines: Engines) -> None:
        self._queue, self._scenario, self._driver, self._engines = queue, scenario, driver, engines
        faults = scenario.faults
        self._left = Counter(
            kills=faults.kills, drains=faults.drains, scale_ups=faults.scale_ups, scale_downs=faults.scale_downs
        )
        self._orders = random.Random(f"orders {scenario.seed}")
        """Draws what an administrator does."""
        self._num_orders = faults.orders
        self._sizes = Counter(prefill=scenario.num_prefill, decode=scenario.num_decode)
        """How many names were given so far, by pool."""
        for pool, size in self._sizes.items():
            for index in range(size):
                engines.start(f"{pool}-{index}")
        self._look()

    def _look(self) -> None:
        if self._driver.dies():
            self._queue.at(self._queue.random.uniform(0.0, TICK_S), self._kill_router)
        self._driver.pauses()
        if self._driver.doors is not None:
            self._driver.doors.look()
        for replica in list(self._engines.replicas.values()):
            if replica.address in self._driver.lost or (replica.draining and replica.service.drained):
                self._end(replica)
            else:
                self._draw(replica)
        if self._due("scale_ups", 0.04):
            pool = self._queue.random.choice(get_args(PoolName))
            self._queue.note(f"scale up {pool}")
            self._engines.start(f"{pool}-{self._sizes[pool]}")
            self._sizes[pool] += 1
        if self._num_orders and self._queue.clock.now > CALM_S and self._orders.random() < 0.05:
            self._num_orders -= 1
            self._order()
        self._driver.lost.clear()
        self._queue.at(TICK_S, self._look)

    def _draw(self, replica: Replica) -> None:
        """Kills an engine, drains it, or takes it away for good; most often it does nothing."""
        if self._due("kills", 0.04):
            self._queue.at(self._queue.random.uniform(0.0, TICK_S), partial(self._end, replica))
        elif not replica.draining and self._due("drains", 0.04):
            self._drain(replica)
        elif not replica.draining and self._can_go(replica) and self._due("scale_downs", 0.04):
            replica.leaving = True
            self._queue.note(f"scale down {replica.name}")
            self._drain(replica)

    def _due(self, what: str, probability: float) -> bool:
        if self._left[what] and self._queue.clock.now > CALM_S and self._queue.chance(probability):
            self._left[what] -= 1
            return True
        return False

    def _can_go(self, replica: Replica) -> bool:
        """True if another engine of its pool stays. A prefill pool may vanish where decode engines can compute
        every prompt alone.
        """
        scenario = self._scenario
        if replica.is_prefill and scenario.router.disaggregation != "strict" and not scenario.needs_prefill:
            return True
        return any(
            other.is_prefill == replica.is_prefill and other is not replica and not other.draining
            for other in self._engines.replicas.values()
        )

    def _drain(self, replica: Replica) -> None:
        """Drains an engine through the router, or at the engine alone, as a stop signal to its process does."""
        replica.draining = True
        deadline_s = self._queue.random.uniform(0.0, 2.0)
        if self._driver.alive and self._queue.random.random() < 0.5:
            self._queue.note(f"drain {replica.name} within {deadline_s:.2f} s")
            self._driver.router.drain_replica(replica.address, deadline_s)
            self._driver.flush()
        else:
            self._queue.note(f"stop {replica.name} within {deadline_s:.2f} s")
            replica.service.handle(Envelope(replica.address, replica.address, 0, Drain(deadline_s=deadline_s)))
            self._engines.turn(replica)

    def _order(self) -> None:
        """An administrator drains an engine that is there, or one that is away, and takes that back later."""
        names = sorted({*self._engines.replicas, *self._engines.awaited})
        name = self._orders.choice(names)
        if self._driver.set_drained(name, True):
            self._queue.num_faults += 1
            self._queue.at(self._orders.choice([0.1, 4.0, 12.0]) * self._orders.random(), partial(self._undrain, name))

    def _undrain(self, name: str) -> None:
        if not self._driver.set_drained(name, False):
            self._queue.at(TICK_S, partial(self._undrain, name))

    # ---- ends and successors

    def _kill_router(self) -> None:
        self._driver.kill()
        self._queue.at(self._queue.random.uniform(0.01, self._queue.random.choice([0.5, 12.0])), self._start_router)

    def _start_router(self) -> None:
        self._driver.start(replica.address for replica in self._engines.replicas.values())

    def _end(self, replica: Replica) -> None:
        """Ends an engine. Later the router hears of it, and a successor starts unless the engine leaves for good. It
        uses the same memory, so it waits until nobody maps that any more, and clears its lease words first.
        """
        if not replica.alive:
            return
        self._engines.end(replica)

        def noticed() -> None:
            if self._driver.alive:
                self._driver.router.replica_down(replica.address)
                self._driver.flush()

        def restart() -> None:
            if self._engines.network.is_mapped(replica.endpoint):
                self._queue.at(MEMORY_RETRY_S, restart)
                return
            self._engines.awaited.remove(replica.name)
            if replica.words is not None:
                replica.words[:] = 0
            replica.cache[:] = -1
            self._engines.start(replica.name)

        self._queue.at(self._queue.random.uniform(0.01, 1.0), noticed)
        if not replica.leaving:
            self._engines.awaited.add(replica.name)
            self._queue.at(self._queue.random.uniform(0.05, 3.0), restart)
