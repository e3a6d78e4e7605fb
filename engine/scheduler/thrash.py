"""Thrashing: KV that preemptions throw away and that is computed again, against what is gained meanwhile; and what is
done about it.
"""

from collections import deque

from protocol.clock import Clock


class ThrashMeter:
    """Tokens recomputed / tokens generated over the last `window_s` seconds, and the seats that this leaves.

    Past `limit` nobody enters beside those that run: the ceiling is the KV, not `max_num_seqs`. Who leaves may be
    followed; with every further preemption the seats sink to those that still run. Below the limit they come back, at
    most twice as many in `window_s`.
    """

    def __init__(self, clock: Clock, *, window_s: float, limit: float, max_num_seqs: int) -> None:
        self._clock, self._window_s, self._limit, self._max_num_seqs = clock, window_s, limit, max_num_seqs
        self._entries: deque[tuple[float, int, int]] = deque()
        """(when, recomputed, generated), oldest first."""
        self._num_recomputed = self._num_generated = 0
        self.seats = max_num_seqs
        """How many may run."""
        self._past_limit = False
        self._changed_at = 0.0
        """When `seats` last changed, or the limit was last passed."""

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

    def adapt(self, num_running: int, *, preempted: bool) -> None:
        """Once a step, when those that run have been served. `preempted`: at the cost of others."""
        was_past_limit, self._past_limit = self._past_limit, self.ratio > self._limit
        if self._past_limit:
            if preempted or not was_past_limit:
                self.seats = max(1, min(self.seats, num_running))
            self._changed_at = self._clock()
        elif self.seats < self._max_num_seqs:
            gained = int((self._clock() - self._changed_at) / self._window_s * self.seats)
            if gained:
                self.seats = min(self.seats + gained, self._max_num_seqs)
                self._changed_at = self._clock()
