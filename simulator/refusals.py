"""A check that the router learns of every refused lease: an engine tells of the attempt's end, unless the router itself
has ended the attempt.
"""

from prefill_pool.service import PrefillService
from protocol.clock import VirtualClock
from protocol.messages import Envelope, KVRelease, StepTokens
from router.router import Router
from simulator.replica import Replica
from simulator.violation import Violation


class Refusals:
    """Refusals of all engines of a run. `router` is the one that lives; None if none does."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self._seed, self._clock = seed, clock
        self.router: Router | None = None
        self._told: set[tuple[int, int, int]] = set()
        """(router epoch, request number, attempt) of every end that an engine has put out."""
        self._open: list[Envelope] = []
        """Refusals that a prefill engine is handling now."""

    def heard(self, replica: Replica, envelope: Envelope) -> None:
        """An engine is about to handle a message."""
        message, service = envelope.message, replica.service
        if not isinstance(service, PrefillService) or not isinstance(message, KVRelease):
            return
        if message.outcome != "refused":
            return
        if any(lease.lease_id == message.lease_id for lease in service.leases()):
            self._open.append(envelope)

    def said(self, message: StepTokens) -> None:
        self._told.update((message.router_epoch, end.request_number, end.attempt) for end in message.ends)

    def check(self) -> None:
        """Checks refusals when the engine has put out its messages. If the decode engine was replaced, the router
        learns of that from the supervisor.
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
