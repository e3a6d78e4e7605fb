"""Requests that a decode engine takes forward together, one token each in every step.

As long as its messages name the same requests in the same order, each with the token after its last, comparing four
arrays takes the place of a look at every row.
"""

from collections.abc import Sequence

from protocol.messages import Address, StepTokens
from router.request import ActiveRequest, Delivered


class Lockstep:
    """What the next message of an engine is likely to say. Void as soon as anything else befalls one of the
    requests.
    """

    __slots__ = ("_attempts", "_counts", "_entries", "_offsets", "_request_ids", "_request_numbers", "at")

    def __init__(self, message: StepTokens, entries: Sequence[ActiveRequest], now: float) -> None:
        self._request_numbers, self._attempts, self._counts = (
            message.request_numbers.tobytes(),
            message.attempts.tobytes(),
            message.counts.tobytes(),
        )
        self._offsets = message.offsets + 1
        self._entries = entries
        self._request_ids = [entry.request.request_id for entry in entries]
        self.at = now
        """When the tokens before came."""

    @staticmethod
    def begin(message: StepTokens, sender: Address, entries: Sequence[ActiveRequest], now: float) -> "Lockstep | None":
        """After `message`, of whose rows those of `entries` counted. None unless each row brought one token that was
        delivered now.
        """
        if len(entries) != len(message.request_numbers):
            return None
        for entry, offset, count in zip(entries, message.offsets.tolist(), message.counts.tolist(), strict=True):
            came = (
                count == 1
                and entry.decode == sender
                and len(entry.delivered) == offset + 1
                and entry.delivered_at == now
            )
            if not came or entry.request.sampling.logprobs is not None:
                return None
        return Lockstep(message, entries, now)

    def goes_on(self, message: StepTokens) -> bool:
        return (
            message.request_numbers.tobytes() == self._request_numbers
            and message.attempts.tobytes() == self._attempts
            and message.offsets.tobytes() == self._offsets.tobytes()
            and message.counts.tobytes() == self._counts
        )

    def advance(self, message: StepTokens, now: float) -> Delivered:
        """Takes a message that goes on."""
        token_ids = message.token_ids.tolist()
        for entry, token_id in zip(self._entries, token_ids, strict=True):
            entry.delivered.append(token_id)
            entry.delivered_at = now
        self._offsets += 1
        self.at = now
        return Delivered(self._request_ids, token_ids, [], {})
