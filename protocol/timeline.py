"""Where the time of a request went: consecutive stages, which never overlap and so add up to its time."""

from protocol.clock import Clock


class Timeline:
    """Seconds per stage of one request in one process. Entering a stage ends the one before."""

    __slots__ = ("_clock", "_since", "_stage", "seconds")

    def __init__(self, clock: Clock, stage: str) -> None:
        self._clock = clock
        self._stage, self._since = stage, clock()
        self.seconds: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """Ends the current stage now and begins `stage`. The times of a stage that is entered twice add up."""
        now = self._clock()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def close(self) -> dict[str, float]:
        """Ends the current stage and returns seconds per stage."""
        self.enter("closed")
        return self.seconds
