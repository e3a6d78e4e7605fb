"""The stages of a request add up to its time."""

from protocol.clock import VirtualClock
from protocol.timeline import Timeline


def test_stages_add_up_to_the_whole_time() -> None:
    clock = VirtualClock(10.0)
    timeline = Timeline(clock, "queue")
    clock.advance_to(11.5)
    timeline.enter("prefill")
    clock.advance_to(14.0)
    timeline.enter("queue")
    clock.advance_to(14.25)
    assert timeline.close() == {
        "queue": 1.75,
        "prefill": 2.5,
    }
    assert sum(timeline.seconds.values()) == 4.25
