"""Many timers of which few ever fire: a heap in which cancelled entries are skipped when they come up."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Timers(Generic[Name]):
    """Named deadlines on one clock. Setting a name again moves its deadline. Names may be anything hashable."""

    def __init__(self) -> None:
        self._at: dict[Name, float] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def names(self) -> list[Name]:
        """The names that are set, in the order in which they were first set."""
        return list(self._at)

    def __contains__(self, name: Name) -> bool:
        return name in self._at

    def set(self, name: Name, at: float) -> None:
        """Sets a timer to fire at `at` (seconds of the owner's clock), in place of an earlier setting."""
        self._at[name] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, name))

    def cancel(self, name: Name) -> None:
        """Forgets a timer. The name may be unknown."""
        self._at.pop(name, None)

    def due(self, now: float) -> list[Name]:
        """Returns the names whose time has come, earliest first, each once, and forgets them."""
        fired = []
        while self._heap and self._heap[0][0] <= now:
            at, _, name = heapq.heappop(self._heap)
            if self._at.get(name) == at:
                del self._at[name]
                fired.append(name)
        return fired

    def next_at(self) -> float | None:
        """When the earliest timer fires; None if no timer is set."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
