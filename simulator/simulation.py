"""The event loop of a simulated run: the real router, services, schedulers and block managers under a virtual clock,
with faults from a seed.

 1. event_queue.py pops the next event and sets the clock.
 2. router_driver.py, engines.py and supervisor.py do what the real shells do: they hand messages and steps to the state
    machines, and send what these put out.
 3. doors.py does so for doors that have processes of their own. Where there are none, router_driver.py is the door.
 4. wire.py delays, doubles and cuts off messages.
 5. invariants.py looks at what the event touched; audit.py counts on its own.

Only three parts are models: the wire, the transfer (blocks move one by one; they may fail, change, or arrive after
their lease died) and the runner (the arithmetic one, whose step takes a drawn time). The same seed gives the same run.
"""

import itertools
from functools import partial

from protocol.errors import ProtocolError
from router.router import Router
from simulator.audit import Audit
from simulator.engines import Engines
from simulator.event_queue import EventQueue
from simulator.invariants import Invariants
from simulator.replica import Replica
from simulator.router_driver import RouterDriver
from simulator.scenario import Client, Scenario
from simulator.supervisor import Supervisor
from simulator.violation import Violation
from simulator.wire import Wire


class Simulation:
    """One run of a scenario. If `checked`, every invariant is checked after every event; if `logged`, `log` keeps
    readable lines.
    """

    def __init__(self, scenario: Scenario, *, checked: bool = True, logged: bool = False) -> None:
        self.scenario, self.seed = scenario, scenario.seed
        self.queue = EventQueue(scenario.seed, logged=logged)
        wire, epochs = Wire(self.queue, scenario.wire_seconds, scenario.faults.duplicate), itertools.count(1)
        self._audit = Audit(scenario, self.queue.clock) if checked else None
        self.driver = RouterDriver(self.queue, scenario, wire, epochs, self._audit)
        self.engines = Engines(self.queue, scenario, wire, self.driver, epochs, self._audit)
        self.supervisor = Supervisor(self.queue, scenario, self.driver, self.engines)
        self._invariants = Invariants(scenario, self.queue.clock, self.driver, self.engines) if checked else None
        for client in scenario.clients:
            self.queue.at(client.submit_at, partial(self.driver.submit, client))

    def run(self) -> None:
        """Runs until everything is quiet. Raises Violation if an invariant does not hold."""
        try:
            while self.driver.busy or not self.engines.quiet:
                self.step()
            if self._invariants is not None and self._audit is not None:
                self._invariants.check_end()
                self._audit.check_end(self.replicas.values(), router_alive=self.driver.alive)
                if not self.num_faults:
                    self._invariants.check_no_timer_fired()
        except ProtocolError as error:
            raise self._violation(str(error)) from error

    def step(self) -> None:
        """Plays one event and checks the invariants after it. Raises Violation if one does not hold."""
        action = self.queue.next()
        if action is None or self.queue.clock.now > self.scenario.horizon_s:
            raise self._violation(f"not quiet after {self.queue.clock.now:.0f} virtual seconds: {self._what_is_left()}")
        action()
        if self._invariants is not None:
            self._invariants.check()

    # ---- the state of the run

    @property
    def router(self) -> Router:
        return self.driver.router

    @property
    def replicas(self) -> dict[str, Replica]:
        """Engines that live, by replica id."""
        return self.engines.replicas

    @property
    def clients(self) -> dict[str, Client]:
        return self.driver.clients

    @property
    def num_events(self) -> int:
        return self.queue.num_events

    @property
    def num_faults(self) -> int:
        return self.queue.num_faults

    @property
    def log(self) -> list[str]:
        return self.queue.log

    def _violation(self, text: str) -> Violation:
        return Violation(self.seed, self.queue.clock.now, text)

    def _what_is_left(self) -> str:
        busy = [name for name, replica in self.replicas.items() if not replica.service.idle]
        return (
            f"requests {sorted(self.driver.open)}, engines {busy}, {len(self.engines.network.pulls)} pulls, "
            f"successors {sorted(self.engines.awaited)}"
        )
