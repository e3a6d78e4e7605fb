"""Order between shells: outgoing messages are numbered; for incoming ones the order is restored, duplicates are dropped
and lasting gaps are reported.

The protocol assumes that messages of one sender reach one receiver in order and once. The connections between processes
guarantee neither.
"""

from dataclasses import dataclass, field

from protocol.clock import Clock
from protocol.messages import Address, Envelope, Message

MAX_HELD = 16_384
"""How many early messages are kept per sender. One more counts as a gap that lasted too long."""


class Outgoing:
    """Numbers the messages of one sender, from 0 for each receiver."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._next_seq: dict[Address, int] = {}

    def sent(self) -> dict[Address, int]:
        """How many messages were numbered so far, by receiver."""
        return dict(self._next_seq)

    def envelope(self, receiver: Address, message: Message) -> Envelope:
        """Puts a message into an envelope. Every envelope must be sent, since the receiver waits for each number."""
        seq = self._next_seq.get(receiver, 0)
        self._next_seq[receiver] = seq + 1
        return Envelope(self.address, receiver, seq, message)


@dataclass(slots=True)
class _Sender:
    """What is known of one replica in the newest epoch that was seen."""

    epoch: int
    expected: int = 0
    """Sequence number that is delivered next."""
    held: dict[int, Envelope] = field(default_factory=dict)
    """Early messages by sequence number; all numbers are above `expected`."""
    gap_since: float | None = None
    """The time in seconds since which a held message waits for a missing one; None while nothing is held."""
    overflown: bool = False
    muted: bool = False

    def mute(self) -> None:
        self.held.clear()
        self.gap_since, self.muted = None, True


class Incoming:
    """Restores the order at one receiver. A newer epoch of a sender replaces the older one, whose later messages
    are then dropped.
    """

    def __init__(self, address: Address, clock: Clock, gap_timeout_s: float = 5.0) -> None:
        self.address = address
        self._clock = clock
        self._gap_timeout_s = gap_timeout_s
        self._senders: dict[str, _Sender] = {}

    def accept(self, envelope: Envelope) -> list[Envelope]:
        """Returns the envelopes that can be delivered now, in order: none, `envelope`, or `envelope` and held ones that
        waited for it.

        An envelope for another epoch of this receiver passes through unordered, even a second time: the service
        decides about it.
        """
        if envelope.receiver != self.address:
            return [envelope]
        name, epoch = envelope.sender
        sender = self._senders.get(name)
        if sender is None or epoch > sender.epoch:
            sender = self._senders[name] = _Sender(epoch)
        if epoch < sender.epoch or sender.muted or envelope.seq < sender.expected or envelope.seq in sender.held:
            return []
        if envelope.seq > sender.expected:
            self._hold(sender, envelope)
            return []
        ready = [envelope]
        sender.expected += 1
        while (following := sender.held.pop(sender.expected, None)) is not None:
            ready.append(following)
            sender.expected += 1
        sender.gap_since = self._clock() if sender.held else None
        return ready

    def lost(self) -> list[Address]:
        """Senders of which a message has been missing for longer than the timeout. Each is reported once and then
        muted, since its order cannot be restored.
        """
        now = self._clock()
        found = []
        for name, sender in self._senders.items():
            if sender.gap_since is not None and (sender.overflown or now - sender.gap_since > self._gap_timeout_s):
                sender.mute()
                found.append(Address(name, sender.epoch))
        return found

    def forget(self, address: Address) -> None:
        """Forgets a dead sender: its held messages, and those that still come, are dropped without a report."""
        sender = self._senders.get(address.replica_id)
        if sender is None or sender.epoch < address.epoch:
            sender = self._senders[address.replica_id] = _Sender(address.epoch)
        if sender.epoch == address.epoch:
            sender.mute()

    def _hold(self, sender: _Sender, envelope: Envelope) -> None:
        if sender.gap_since is None:
            sender.gap_since = self._clock()
        if len(sender.held) < MAX_HELD:
            sender.held[envelope.seq] = envelope
        else:
            sender.overflown = True
