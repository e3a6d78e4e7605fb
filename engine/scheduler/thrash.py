"""Thrashing: preemptions throw KV away that is then computed again. Here it is measured against the tokens generated
meanwhile, and kept low.
"""

from collections import deque

from protocol.clock import Clock


class ThrashMeter:
    """The ratio of tokens recomputed to tokens generated over the last `window_s` seconds, and the seats
    that it allows.

    Past `limit` the seats are as many as the sequences that run: the KV is the ceiling, not `max_num_seqs`. A sequence
    that leaves may be replaced. With every further preemption the seats sink to the sequences that still run. Below the
    limit they come back, at most doubling within `window_s`.
    """

    def __init__(self, clock: Clock, *, window_s: float, limit: float, max_num_seqs: int) -> None:
        self._clock, self._window_s, self._limit, self._max_num_seqs = clock, window_s, limit, max_num_seqs
        self._entries: deque[tuple[float, int, int]] = deque()
        """(time in seconds, tokens recomputed, tokens generated), oldest first."""
        self._num_recomputed = self._num_generated = 0
        self.seats = max_num_seqs
        """How many sequences may run."""
        self._past_limit = False
        self._changed_at = 0.0
        """When `seats` last changed, or the limit was last passed."""

    def add(self, *, recomputed: int, generated: int) -> None:
        """Notes how many tokens were recomputed and generated just now."""
        self._entries.append((self._clock(), recomputed, generated))
        self._num_recomputed += recomputed
        self._num_generated += generated

    @property
    def ratio(self) -> float:
        """Tokens recomputed per token generated in the window; the tokens recomputed if none was generated."""
        oldest = self._clock() - self._window_s
        while self._entries and self._entries[0][0] < oldest:
            _, recomputed, generated = self._entries.popleft()
            self._num_recomputed -= recomputed
            self._num_generated -= generated
        return self._num_recomputed / max(self._num_generated, 1)

    def adapt(self, num_running: int, *, preempted: bool) -> None:
        """Sets the seats. Called once a step, when running sequences have been served; `preempted` says that this
        step evicted some.
        """
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
