"""What the simulator raises."""


class Violation(Exception):
    """An invariant does not hold. Carries the seed, so that the run can be had again."""

    def __init__(self, seed: int, now: float, text: str) -> None:
        super().__init__(seed, now, text)
        self.seed, self.now, self.text = seed, now, text

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.now:.4f} s: {self.text}"
