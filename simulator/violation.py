"""The exception that the simulator raises."""


class Violation(Exception):
    """An invariant does not hold. The violation carries the seed, so that the run can be repeated."""

    def __init__(self, seed: int, now: float, text: str) -> None:
        super().__init__(seed, now, text)
        self.seed, self.now, self.text = seed, now, text

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.now:.4f} s: {self.text}"
