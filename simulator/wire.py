"""The wire of a simulated run. Every message takes a drawn time, so messages overtake each other. Some come twice,
some are cut off.
"""

from collections.abc import Callable
from functools import partial

from protocol.delivery import Outgoing
from protocol.messages import Address, Envelope, KVHandoff, KVRelease, Message
from simulator.event_queue import EventQueue

Inlet = Callable[[Envelope], None]


class Wire:
    """Carries messages to `inlets`, the processes that take messages now, by replica id. All others are lost."""

    def __init__(self, queue: EventQueue, seconds: Callable[[], float], duplicate: float) -> None:
        self.inlets: dict[str, Inlet] = {}
        self._queue, self._seconds, self._duplicate = queue, seconds, duplicate
        self._cut: dict[tuple[Address, Address], int] = {}
        """By (dead sender, receiver), the number of the first message that does not arrive."""

    def send(self, envelope: Envelope) -> None:
        for _ in range(2 if self._queue.chance(self._duplicate) else 1):
            self._queue.at(self._seconds(), partial(self._arrive, envelope))

    def cut_off(self, outgoing: Outgoing) -> None:
        """The sender is dead. Its messages that are still under way to a receiver arrive up to a drawn one."""
        for receiver, num_sent in outgoing.sent().items():
            self._cut[outgoing.address, receiver] = max(0, num_sent - self._queue.random.choice([0, 0, 1, 2, 5]))

    def _arrive(self, envelope: Envelope) -> None:
        if self._cut and envelope.seq >= self._cut.get((envelope.sender, envelope.receiver), envelope.seq + 1):
            return
        inlet = self.inlets.get(envelope.receiver.replica_id)
        if inlet is not None:
            inlet(envelope)


def text(envelope: Envelope) -> str:
    """The envelope as a line of the log."""
    message: Message = envelope.message
    key = getattr(message, "key", None)
    what = f" {key.request_id}#{key.attempt}" if key is not None else ""
    if isinstance(message, KVHandoff):
        what += f" {message.num_ready_tokens} tokens{', final' if message.final else ''}"
    elif isinstance(message, KVRelease):
        what += f" {message.outcome} {message.reason}".rstrip()
    return f"{envelope.sender.replica_id} -> {envelope.receiver.replica_id}: {type(message).__name__}{what}"
