"""Messages are delivered in order and exactly once, through new epochs and gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import delivery
from protocol.clock import VirtualClock
from protocol.delivery import Incoming, Outgoing
from protocol.messages import Address, Drain, Envelope, RouterStatus

HERE = Address("decode-0", 4)
PREFILL = Address("prefill-0", 9)
ROUTER = Address("router", 2)


def numbered(sender: Address, count: int, receiver: Address = HERE) -> list[Envelope]:
    outgoing = Outgoing(sender)
    return [outgoing.envelope(receiver, Drain(deadline_s=float(i))) for i in range(count)]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Envelope]:
    """The messages of two senders in any order, each at least once and some twice."""
    sent = numbered(PREFILL, draw(st.integers(1, 12))) + numbered(ROUTER, draw(st.integers(1, 12)))
    twice = draw(st.lists(st.sampled_from(sent), max_size=12))
    return draw(st.permutations(sent + twice))


@given(arrivals())
def test_any_interleaving_is_delivered_once_and_in_order(arriving: list[Envelope]) -> None:
    incoming = Incoming(HERE, VirtualClock())
    delivered = [ready for envelope in arriving for ready in incoming.accept(envelope)]
    for sender in (PREFILL, ROUTER):
        seqs = [envelope.seq for envelope in delivered if envelope.sender == sender]
        assert seqs == list(range(len({e.seq for e in arriving if e.sender == sender})))
    assert incoming.lost() == []


@given(arrivals(), st.data())
def test_without_one_message_nothing_after_it_is_delivered_and_its_sender_is_lost(
    arriving: list[Envelope], data: st.DataObject
) -> None:
    clock = VirtualClock()
    incoming = Incoming(HERE, clock, gap_timeout_s=5.0)
    missing = data.draw(st.integers(0, max(e.seq for e in arriving if e.sender == PREFILL)))
    left = [e for e in arriving if (e.sender, e.seq) != (PREFILL, missing)]
    delivered = [ready for envelope in left for ready in incoming.accept(envelope)]
    assert [e.seq for e in delivered if e.sender == PREFILL] == list(range(missing))
    gap = any(e.sender == PREFILL and e.seq > missing for e in left)
    clock.advance_to(5.0)
    assert incoming.lost() == []
    clock.advance_to(5.1)
    assert incoming.lost() == ([PREFILL] if gap else [])
    assert incoming.lost() == []


def test_numbers_count_per_receiver() -> None:
    outgoing = Outgoing(ROUTER)
    status = RouterStatus(router_epoch=2, seq=0, prefill_room_blocks=0, prefill_max_tokens=0)
    other = Address("decode-0", 5)
    assert [outgoing.envelope(to, status).seq for to in (HERE, other, HERE, other, HERE)] == [0, 0, 1, 1, 2]


def test_a_newer_epoch_replaces_the_older() -> None:
    clock = VirtualClock()
    incoming = Incoming(HERE, clock)
    old, new = numbered(PREFILL, 3), numbered(Address("prefill-0", 10), 2)
    assert incoming.accept(old[0]) == [old[0]]
    assert incoming.accept(old[2]) == []
    assert incoming.accept(new[1]) == []
    assert incoming.accept(old[1]) == []
    assert incoming.accept(new[0]) == new
    clock.advance_to(100.0)
    assert incoming.lost() == []


def test_a_lost_sender_is_muted_until_its_next_epoch() -> None:
    clock = VirtualClock()
    incoming = Incoming(HERE, clock)
    old, new = numbered(PREFILL, 3), numbered(Address("prefill-0", 10), 1)
    incoming.accept(old[1])
    clock.advance_to(6.0)
    assert incoming.lost() == [PREFILL]
    assert incoming.accept(old[0]) == incoming.accept(old[2]) == []
    assert incoming.accept(new[0]) == new


def test_the_clock_of_a_gap_starts_again_when_it_closes() -> None:
    clock = VirtualClock()
    incoming = Incoming(HERE, clock)
    sent = numbered(PREFILL, 5)
    incoming.accept(sent[1])
    incoming.accept(sent[3])
    clock.advance_to(4.0)
    assert incoming.accept(sent[0]) == sent[:2]
    clock.advance_to(8.0)
    assert incoming.lost() == []
    assert incoming.accept(sent[2]) == sent[2:4]
    clock.advance_to(100.0)
    assert incoming.lost() == []


def test_a_forgotten_sender_is_dropped_silently() -> None:
    clock = VirtualClock()
    incoming = Incoming(HERE, clock)
    old, new = numbered(PREFILL, 3), numbered(Address("prefill-0", 10), 1)
    incoming.accept(old[1])
    incoming.forget(PREFILL)
    assert incoming.accept(old[2]) == []
    clock.advance_to(100.0)
    assert incoming.lost() == []
    assert incoming.accept(new[0]) == new
    incoming.forget(PREFILL)
    assert incoming.accept(numbered(Address("prefill-0", 10), 2)[1]) != []


def test_messages_to_another_epoch_of_ours_pass_through() -> None:
    incoming = Incoming(HERE, VirtualClock())
    sent = numbered(PREFILL, 3, receiver=Address("decode-0", 3))
    assert incoming.accept(sent[2]) == sent[2:]
    assert incoming.accept(sent[0]) == sent[:1]
    assert incoming.accept(numbered(PREFILL, 1)[0]) != []


def test_too_many_early_messages_are_a_gap_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_HELD", 2)
    incoming = Incoming(HERE, VirtualClock())
    for envelope in numbered(PREFILL, 4)[1:]:
        assert incoming.accept(envelope) == []
    assert incoming.lost() == [PREFILL]
