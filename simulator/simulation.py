"""The event-heap driver: the real router, services, schedulers and block managers under a virtual clock, with faults from a seed.

 1. heap.py pops the next event and sets the clock
 2. router_shell.py, engines.py, supervisor.py do what the real shells do: hand messages and steps to the state machines, carry off
    what these put out
 3. wire.py delays, doubles and cuts off what is sent
 4. invariants.py looks at what the event touched; ledger.py has counted on its own

Only three things are models here: the wire, the transfer (blocks move one by one, may fail, may change, may end after their lease
died) and the runner (the arithmetic one, whose step takes a drawn time). Same seed, same run.
"""

import itertools
from functools import partial

from protocol.errors import ProtocolError
from router.router import Router
from simulator.engines import Engines
from simulator.heap import Heap
from simulator.invariants import Invariants
from simulator.ledger import Ledger
from simulator.replica import Replica
from simulator.router_shell import RouterShell
from simulator.scenario import Client, Scenario
from simulator.supervisor import Supervisor
from simulator.violation import Violation
from simulator.wire import Wire


class Simulation:
    """One run of a scenario. `checked`: every invariant after every event; `logged`: `log` keeps readable lines."""

    def __init__(self, scenario: Scenario, *, checked: bool = True, logged: bool = False) -> None:
        self.scenario, self.seed = scenario, scenario.seed
        self.heap = Heap(scenario.seed, logged=logged)
        wire, epochs = Wire(self.heap, scenario.wire_seconds, scenario.faults.duplicate), itertools.count(1)
        self._ledger = Ledger(scenario, self.heap.clock) if checked else None
        self.shell = RouterShell(self.heap, scenario, wire, epochs, self._ledger)
        self.engines = Engines(self.heap, scenario, wire, self.shell, epochs, self._ledger)
        self.supervisor = Supervisor(self.heap, scenario, self.shell, self.engines)
        self._invariants = Invariants(scenario, self.heap.clock, self.shell, self.engines) if checked else None
        for client in scenario.clients:
            self.heap.at(client.submit_at, partial(self.shell.submit, client))

    def run(self) -> None:
        """Until everything is quiet. Raises Violation."""
        try:
            while self.shell.open or not self.engines.quiet:
                self.step()
            if self._invariants is not None and self._ledger is not None:
                self._invariants.check_end()
                self._ledger.check_end(self.replicas.values(), router_alive=self.shell.alive)
                if not self.num_faults:
                    self._invariants.check_no_timer_fired()
        except ProtocolError as error:
            raise self._violation(str(error)) from error

    def step(self) -> None:
        """One event, and the invariants after it."""
        action = self.heap.next()
        if action is None or self.heap.clock.now > self.scenario.horizon_s:
            raise self._violation(f"not quiet after {self.heap.clock.now:.0f} virtual seconds: {self._what_is_left()}")
        action()
        if self._invariants is not None:
            self._invariants.check()

    # ---- what it has come to

    @property
    def router(self) -> Router:
        return self.shell.router

    @property
    def replicas(self) -> dict[str, Replica]:
        """Engines that live, by replica id."""
        return self.engines.replicas

    @property
    def clients(self) -> dict[str, Client]:
        return self.shell.clients

    @property
    def num_events(self) -> int:
        return self.heap.num_events

    @property
    def num_faults(self) -> int:
        return self.heap.num_faults

    @property
    def log(self) -> list[str]:
        return self.heap.log

    def _violation(self, text: str) -> Violation:
        return Violation(self.seed, self.heap.clock.now, text)

    def _what_is_left(self) -> str:
        busy = [name for name, replica in self.replicas.items() if not replica.service.idle]
        return f"requests {sorted(self.shell.open)}, engines {busy}, {len(self.engines.network.pulls)} pulls"
