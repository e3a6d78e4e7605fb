"""Thrashing: KV that preemptions throw away and that is computed again, against what is gained meanwhile."""

from collections import deque

from protocol.clock import Clock


class ThrashMeter:
    """Tokens recomputed / tokens generated over the last `window_s` seconds."""

    def __init__(self, clock: Clock, *, window_s: float, limit: float) -> None:
        self._clock, self._window_s, self._limit = clock, window_s, limit
        self._entries: deque[tuple[float, int, int]] = deque()
        """(when, recomputed, generated), oldest first."""
        self._num_recomputed = self._num_generated = 0

    def add(self, *, recomputed: int, generated: int) -> None:
        """Notes what one step did."""
        self._entries.append((self._clock(), recomputed, generated))
        self._num_recomputed += recomputed
        self._num_generated += generated

    @property
    def ratio(self) -> float:
        """0 while nothing is recomputed; at least the number of recomputed tokens while nothing is generated."""
        oldest = self._clock() - self._window_s
        while self._entries and self._entries[0][0] < oldest:
            _, recomputed, generated = self._entries.popleft()
            self._num_recomputed -= recomputed
            self._num_generated -= generated
        return self._num_recomputed / max(self._num_generated, 1)

    @property
    def past_limit(self) -> bool:
        return self.ratio > self._limit
