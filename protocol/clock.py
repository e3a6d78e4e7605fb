"""Time as an argument. All code that decides takes a `Clock`; only shells pass the real one."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns monotonic seconds from an arbitrary origin. Two processes' times are never compared."""


class VirtualClock:
    """A clock that moves only when it is told to. Tests and the simulator read and advance it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance_to(self, now: float) -> None:
        """Moves forward to `now` (seconds). Raises ValueError if that is in the past."""
        if now < self.now:
            raise ValueError(f"now: {now} lies before the clock's {self.now}")
        self.now = now
