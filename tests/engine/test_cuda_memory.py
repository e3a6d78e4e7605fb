"""An engine on a GPU waits for the memory that its dead predecessor held, and not for ever."""

from engine.runners.cuda_memory import MEMORY_WAIT_S, await_memory
from protocol.clock import VirtualClock


class Device:
    """Its memory comes back at `back_at`; time passes when somebody sleeps."""

    def __init__(self, back_at: float) -> None:
        self.clock, self._back_at = VirtualClock(), back_at

    def free_bytes(self) -> int:
        return 90 if self.clock.now >= self._back_at else 10

    def sleep(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now + seconds)

    def awaited_s(self) -> float:
        await_memory(self.free_bytes, 80, self.clock, self.sleep)
        return self.clock.now


def test_free_memory_is_not_waited_for() -> None:
    assert Device(back_at=0.0).awaited_s() == 0.0


def test_memory_that_comes_back_is_waited_for() -> None:
    assert 3.0 <= Device(back_at=3.0).awaited_s() < 3.2


def test_memory_that_others_keep_is_waited_for_only_so_long() -> None:
    assert MEMORY_WAIT_S <= Device(back_at=1000.0).awaited_s() < MEMORY_WAIT_S + 0.2
