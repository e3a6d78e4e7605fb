"""What a simulated run really did: one book per life of a process, kept at its borders and held against what it says of itself."""

from collections.abc import Iterable

from protocol.clock import VirtualClock
from protocol.messages import Address, Envelope, GenerateRequest
from router.router import Router
from simulator.engine_book import EngineBook
from simulator.refusals import Refusals
from simulator.replica import Replica
from simulator.router_book import RouterBook
from simulator.scenario import Scenario


class Ledger:
    """All books of a run. `router`: of the present router, or of the last one."""

    def __init__(self, scenario: Scenario, clock: VirtualClock) -> None:
        self._scenario, self._clock = scenario, clock
        self._engines: dict[Address, EngineBook] = {}
        self.router: RouterBook
        self.refusals = Refusals(scenario.seed, clock)

    def router_starts(self, router: Router) -> None:
        self.router, self.refusals.router = RouterBook(self._scenario, self._clock, router), router

    def router_dies(self) -> None:
        self.router.check()
        self.refusals.router = None

    def engine(self, replica: Replica) -> EngineBook:
        """Opened when first asked for."""
        book = self._engines.get(replica.address)
        if book is None:
            book = self._engines[replica.address] = EngineBook(self._scenario.seed, self._clock, replica, self.refusals)
        return book

    def router_says(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, GenerateRequest):
            self.router.dispatched(envelope.receiver, envelope.message)

    def check_end(self, replicas: Iterable[Replica], *, router_alive: bool) -> None:
        """Everything is quiet."""
        if router_alive:
            self.router.check()
        for replica in replicas:
            self.engine(replica).check()
