"""Timers fire in order, can be moved and can be cancelled."""

from protocol.timers import Timers


def test_timers_fire_once_earliest_first() -> None:
    timers: Timers[str] = Timers()
    timers.set("late", 3.0)
    timers.set("early", 1.0)
    assert timers.due(0.5) == []
    assert timers.due(3.0) == ["early", "late"]
    assert timers.due(9.0) == []


def test_a_timer_set_again_moves_and_a_cancelled_one_is_silent() -> None:
    timers: Timers[str] = Timers()
    timers.set("lease", 1.0)
    timers.set("lease", 5.0)
    timers.set("gone", 2.0)
    timers.cancel("gone")
    timers.cancel("never set")
    assert timers.due(4.0) == []
    assert timers.next_at() == 5.0
    assert timers.due(5.0) == ["lease"]
    assert timers.next_at() is None and len(timers) == 0
