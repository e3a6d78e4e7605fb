"""The virtual time of a simulated run: what happens next, what chance decides, and the log."""

import heapq
import itertools
import random
from collections.abc import Callable

from protocol.clock import VirtualClock

Action = Callable[[], None]


class EventQueue:
    """Actions in the order of their times. Among equal times, the action that was planned first comes first."""

    def __init__(self, seed: int, *, logged: bool = False) -> None:
        self.clock = VirtualClock()
        self.random = random.Random(f"run {seed}")
        """Draws faults and their times. The scenario has random streams of its own."""
        self.num_events = self.num_faults = 0
        self.logged = logged
        self.log: list[str] = []
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, action: Action) -> None:
        self.at_time(self.clock.now + delay_s, action)

    def at_time(self, time_s: float, action: Action) -> None:
        """Plans what must not move by the rounding of a difference of times, because it has to keep an order."""
        heapq.heappush(self._heap, (time_s, next(self._order), action))

    def next(self) -> Action | None:
        """Advances the clock to the next action and returns it; None if nothing is planned."""
        if not self._heap:
            return None
        at, _, action = heapq.heappop(self._heap)
        self.clock.advance_to(at)
        self.num_events += 1
        return action

    def chance(self, probability: float) -> bool:
        """Draws whether a fault happens, and counts one that does."""
        if probability and self.random.random() < probability:
            self.num_faults += 1
            return True
        return False

    def note(self, text: str) -> None:
        """Adds a line to the log. In hot code ask `logged` before making the text."""
        if self.logged:
            self.log.append(f"{self.clock.now:9.4f}  {text}")
