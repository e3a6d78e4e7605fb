"""The wire of a simulated run: every message takes a drawn time, so they overtake each other; some come twice, some are
cut off.
"""

from collections.abc import Callable
from functools import partial

from protocol.delivery import Outgoing
from protocol.messages import Address, Envelope, KVHandoff, KVRelease, Message
from simulator.event_queue import EventQueue

Inlet = Callable[[Envelope], None]


class Wire:
    """`inlets`: by replica id, who takes messages now; what comes for anybody else is lost."""

    def __init__(self, queue: EventQueue, seconds: Callable[[], float], duplicate: float) -> None:
        self.inlets: dict[str, Inlet] = {}
        self._queue, self._seconds, self._duplicate = queue, seconds, duplicate
        self._cut: dict[tuple[Address, Address], int] = {}
        """By (dead sender, receiver): the first of its messages that does not arrive."""

    def send(self, envelope: Envelope) -> None:
        for _ in range(2 if self._queue.chance(self._duplicate) else 1):
            self._queue.at(self._seconds(), partial(self._arrive, envelope))

    def cut_off(self, outgoing: Outgoing) -> None:
        """The sender is dead: of what is still under way to each receiver a drawn beginning arrives."""
        for receiver, num_sent in outgoing.sent().items():
            self._cut[outgoing.address, receiver] = max(0, num_sent - self._queue.random.choice([0, 0, 1, 2, 5]))

    def _arrive(self, envelope: Envelope) -> None:
        if self._cut and envelope.seq >= self._cut.get((envelope.sender, envelope.receiver), envelope.seq + 1):
            return
        inlet = self.inlets.get(envelope.receiver.replica_id)
        if inlet is not None:
            inlet(envelope)


def text(envelope: Envelope) -> str:
    """A line of the log."""
    message: Message = envelope.message
    key = getattr(message, "key", None)
    what = f" {key.request_id}#{key.attempt}" if key is not None else ""
    if isinstance(message, KVHandoff):
        what += f" {message.num_ready_tokens} tokens{', final' if message.final else ''}"
    elif isinstance(message, KVRelease):
        what += f" {message.outcome} {message.reason}".rstrip()
    return f"{envelope.sender.replica_id} -> {envelope.receiver.replica_id}: {type(message).__name__}{what}"
