"""Every refused lease reaches the router: an engine has told of the attempt's end, or the router has ended it
itself.
"""

from prefill_pool.service import PrefillService
from protocol.clock import VirtualClock
from protocol.messages import Envelope, KVRelease, StepTokens
from router.router import Router
from simulator.replica import Replica
from simulator.violation import Violation


class Refusals:
    """Over all engines of a run. `router`: the one that lives; None: there is none."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self._seed, self._clock = seed, clock
        self.router: Router | None = None
        self._told: set[tuple[int, int, int]] = set()
        """(router epoch, request_number, attempt) of every end that an engine has put out."""
        self._open: list[Envelope] = []
        """Refusals that a prefill engine is handling."""

    def heard(self, replica: Replica, envelope: Envelope) -> None:
        """What an engine is about to handle."""
        message, service = envelope.message, replica.service
        if (
            not isinstance(message, KVRelease)
            or message.outcome != "refused"
            or not isinstance(service, PrefillService)
        ):
            return
        if any(lease.lease_id == message.lease_id for lease in service.leases()):
            self._open.append(envelope)

    def said(self, message: StepTokens) -> None:
        self._told.update((message.router_epoch, end.request_number, end.attempt) for end in message.ends)

    def check(self) -> None:
        """After the engine has said what it had to say. Of a decode engine that was replaced the router learns from its
        supervisor.
        """
        for envelope in self._open:
            message = envelope.message
            assert isinstance(message, KVRelease)
            for entry in self.router.active() if self.router is not None else ():
                told = (message.key.router_epoch, entry.request_number, message.key.attempt) in self._told
                if entry.key == message.key and entry.decode == envelope.sender and not told:
                    what = (
                        f"the refusal of {message.key.request_id}#{message.key.attempt} is told by nobody: "
                        f"{message.reason}"
                    )
                    raise Violation(self._seed, self._clock.now, what)
        self._open.clear()
