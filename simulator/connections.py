"""The threads in which decode engines of a simulated run open the caches of prefill engines."""

from collections.abc import Callable
from functools import partial

from kv_transfer.transports.local import LocalConnection, LocalNetwork
from simulator.event_queue import EventQueue
from simulator.replica import Replica
from simulator.scenario import Scenario


class Connections:
    """`turn` wakes an engine whose connection is terminal."""

    def __init__(
        self, queue: EventQueue, scenario: Scenario, network: LocalNetwork, turn: Callable[[Replica], None]
    ) -> None:
        self._queue, self._scenario, self._network, self._turn = queue, scenario, network, turn
        self._planned: set[LocalConnection] = set()

    def plan(self, replica: Replica) -> None:
        """Plans the end of each new connection. It comes whether somebody still wants the peer or not."""
        for connection in self._of(replica):
            if connection in self._planned:
                continue
            self._planned.add(connection)
            seconds = self._scenario.connect_seconds()
            if self._queue.chance(self._scenario.faults.connect_stall):
                seconds += self._queue.random.uniform(1.0, 30.0)
                self._queue.note(f"{replica.name}: opening a peer takes {seconds:.1f} s")
            self._queue.at(seconds, partial(self._end, replica, connection))

    def end(self, replica: Replica) -> None:
        """Who connects is dead."""
        for connection in self._of(replica):
            self._planned.remove(connection)
            connection.fail("who connects is dead")

    def _of(self, replica: Replica) -> list[LocalConnection]:
        return [connection for connection in self._network.connections if connection.cache.base is replica.cache]

    def _end(self, replica: Replica, connection: LocalConnection) -> None:
        if connection.done:
            return  # with its engine
        self._planned.remove(connection)
        if self._queue.chance(self._scenario.faults.connect_failure):
            self._queue.note(f"{replica.name}: a peer cannot be opened")
            connection.fail("cut")
        else:
            connection.advance()
        self._turn(replica)
