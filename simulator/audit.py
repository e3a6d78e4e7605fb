"""Audits of a simulated run. There is one per life of a process: it counts what crosses the borders of the process, and
compares that with what the process says of itself.
"""

from collections.abc import Iterable

from protocol.clock import VirtualClock
from protocol.messages import Address, EngineRequest, Envelope
from router.router import Router
from simulator.engine_audit import EngineAudit
from simulator.refusals import Refusals
from simulator.replica import Replica
from simulator.router_audit import RouterAudit
from simulator.scenario import Scenario


class Audit:
    """All audits of a run. `router` is the audit of the present router, or of the last one."""

    def __init__(self, scenario: Scenario, clock: VirtualClock) -> None:
        self._scenario, self._clock = scenario, clock
        self._engines: dict[Address, EngineAudit] = {}
        self.router: RouterAudit
        self.refusals = Refusals(scenario.seed, clock)

    def router_starts(self, router: Router) -> None:
        self.router, self.refusals.router = RouterAudit(self._scenario, self._clock, router), router

    def router_dies(self) -> None:
        self.router.check()
        self.refusals.router = None

    def engine(self, replica: Replica) -> EngineAudit:
        """The audit of an engine. It is opened when it is first asked for."""
        audit = self._engines.get(replica.address)
        if audit is None:
            audit = self._engines[replica.address] = EngineAudit(
                self._scenario.seed, self._clock, replica, self.refusals
            )
        return audit

    def router_says(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, EngineRequest):
            self.router.dispatched(envelope.receiver, envelope.message)

    def check_end(self, replicas: Iterable[Replica], *, router_alive: bool) -> None:
        """Checks all audits at the end of the run, when everything is quiet."""
        if router_alive:
            self.router.check()
        for replica in replicas:
            self.engine(replica).check()
