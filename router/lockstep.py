"""Requests that a decode engine takes forward together, one token each in every step.

As long as the engine's messages name the same requests in the same order, each with its next token, the router compares
four arrays instead of looking at every row.
"""

from collections.abc import Sequence

from protocol.messages import Address, StepTokens
from router.request import ActiveRequest, Delivered


class Lockstep:
    """The rows that an engine's next message is likely to have. It must be dropped as soon as anything else happens to
    one of the requests.
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
        """When the previous tokens came."""

    @staticmethod
    def begin(message: StepTokens, sender: Address, entries: Sequence[ActiveRequest], now: float) -> "Lockstep | None":
        """Returns the lockstep that follows `message`, whose rows for `entries` counted. Returns None unless every row
        brought one token that was delivered just now, and no request wants logprobs.
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
        """Whether a message has the expected rows."""
        return (
            message.request_numbers.tobytes() == self._request_numbers
            and message.attempts.tobytes() == self._attempts
            and message.offsets.tobytes() == self._offsets.tobytes()
            and message.counts.tobytes() == self._counts
        )

    def advance(self, message: StepTokens, now: float) -> Delivered:
        """Takes a message that `goes_on`. Returns its tokens as delivered."""
        token_ids = message.token_ids.tolist()
        for entry, token_id in zip(self._entries, token_ids, strict=True):
            entry.delivered.append(token_id)
            entry.delivered_at = now
        self._offsets += 1
        self.at = now
        return Delivered(self._request_ids, token_ids, [], {})
