"""The legal transitions of a handoff, as data: one table for the prefill side, one for the decode side, and the timers
of each state.

The services call `advance` at each transition; what no table lists raises ProtocolError. An event that a state ignores
is not listed: the service drops it before it asks. Guards and actions live in the services; where a guard decides, an
event has several next states and the service names the one it goes to. A timer runs only in states that list it: the
service cancels the others at each transition.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, TypeVar

from protocol.errors import ProtocolError


class PrefillState(StrEnum):
    """One attempt at the prefill engine. It is GONE before its request and after its end."""

    GONE = "gone"
    WAITING = "waiting"
    RUNNING = "running"
    """The attempt owns the blocks of its whole prompt. From its first handoff on they are leased, too."""
    LEASED = "leased"
    """The final handoff was sent; the lease owns the blocks, the lease timer runs."""
    REVOKING = "revoking"
    """The engine wants its blocks back; the revoke timer runs until the decode engine answers."""


class DecodeState(StrEnum):
    """One attempt at the decode engine. It is GONE before its first message and after its end."""

    GONE = "gone"
    EARLY = "early"
    """A handoff without its request; it has no blocks."""
    WAITING = "waiting"
    """A request without blocks."""
    RESERVED = "reserved"
    """The attempt owns its whole destination and pulls into it."""
    DRAINING = "draining"
    """The attempt has ended, but a pull still writes into its destination."""
    RUNNING = "running"


class PrefillEvent(StrEnum):
    REQUEST = "request"
    CANNOT_SERVE = "cannot_serve"
    """The engine drains, or the prompt can never fit."""
    ADMITTED = "admitted"
    CHUNK = "chunk"
    """A chunk was committed that is not the last."""
    LAST_CHUNK = "last_chunk"
    STEP_FAILED = "step_failed"
    """The runner could not compute the step."""
    ABORT = "abort"
    DEADLINE = "deadline"
    ROUTER_GONE = "router_gone"
    DRAIN_DEADLINE = "drain_deadline"
    PEER_LOST = "peer_lost"
    CONSUMED = "consumed"
    REFUSED = "refused"
    LEASE_TIMER = "lease_timer"
    REVOKE_TIMER = "revoke_timer"


class DecodeEvent(StrEnum):
    REQUEST = "request"
    HANDOFF = "handoff"
    BAD_HANDOFF = "bad_handoff"
    """Its layout fingerprint differs from ours."""
    CANNOT_SERVE = "cannot_serve"
    RESERVED = "reserved"
    ADMITTED = "admitted"
    """The prompt is to be computed here: there is no peer."""
    PULL_STARTED = "pull_started"
    PULL_VERIFIED = "pull_verified"
    PULL_FAILED = "pull_failed"
    """The bytes did not come, or the lease word had changed."""
    PULL_ENDED = "pull_ended"
    """The pull is terminal either way, and nobody wants it."""
    ARRIVED = "arrived"
    """The handoff is final and all of it is verified."""
    FINISHED = "finished"
    STEP_FAILED = "step_failed"
    RETURNED = "returned"
    """The sequence was preempted in mode remote."""
    ABORT = "abort"
    DEADLINE = "deadline"
    ROUTER_GONE = "router_gone"
    DRAIN_DEADLINE = "drain_deadline"
    REVOKE = "revoke"
    EARLY_TIMER = "early_timer"


PrefillTimer = Literal["deadline", "lease", "revoke"]
DecodeTimer = Literal["deadline", "early", "pull", "renew"]

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Table = Mapping[tuple[S, E], frozenset[S]]


def advance(table: Table[S, E], state: S, event: E, to: S | None = None) -> S:
    """Returns the state after `event`. `to` is the one that the guard chose; it may be left out where only one is
    listed. Raises ProtocolError when the table does not list the event in this state, or not with this outcome.
    """
    listed = table.get((state, event))
    if listed is None:
        raise ProtocolError(f"{event} in state {state} is listed in no table")
    if to is None:
        if len(listed) > 1:
            raise ProtocolError(f"{event} in state {state} leads to {', '.join(sorted(listed))}: name one")
        return next(iter(listed))
    if to not in listed:
        raise ProtocolError(f"{event} leads from {state} to {', '.join(sorted(listed))}, never to {to}")
    return to


def _table(rows: list[tuple[tuple[S, ...], tuple[E, ...], tuple[S, ...] | None]]) -> Table[S, E]:
    """Makes a table of rows of (states, events, next states), where None means that the state stays. Raises ValueError
    for a pair given twice.
    """
    table: dict[tuple[S, E], frozenset[S]] = {}
    for states, events, following in rows:
        for state in states:
            for event in events:
                if (state, event) in table:
                    raise ValueError(f"{event} in state {state} is listed twice")
                table[state, event] = frozenset(following or (state,))
    return table


def _prefill_table() -> Table[PrefillState, PrefillEvent]:
    s, e = PrefillState, PrefillEvent
    return _table(
        [
            ((s.GONE,), (e.REQUEST,), (s.WAITING,)),
            ((s.WAITING,), (e.CANNOT_SERVE,), (s.GONE,)),
            ((s.WAITING,), (e.ADMITTED,), (s.RUNNING,)),
            ((s.WAITING,), (e.ABORT, e.DEADLINE, e.ROUTER_GONE, e.DRAIN_DEADLINE), (s.GONE,)),
            ((s.RUNNING,), (e.CHUNK,), None),
            ((s.RUNNING,), (e.LAST_CHUNK,), (s.LEASED, s.REVOKING, s.GONE)),
            # REVOKING once anything was handed off, GONE before.
            ((s.RUNNING,), (e.ABORT, e.DEADLINE, e.ROUTER_GONE, e.DRAIN_DEADLINE, e.STEP_FAILED), (s.REVOKING, s.GONE)),
            ((s.RUNNING,), (e.PEER_LOST, e.REFUSED), (s.GONE,)),
            ((s.LEASED,), (e.ABORT, e.ROUTER_GONE, e.DRAIN_DEADLINE), (s.REVOKING,)),
            ((s.LEASED,), (e.PEER_LOST, e.CONSUMED, e.REFUSED, e.LEASE_TIMER), (s.GONE,)),
            ((s.REVOKING,), (e.ABORT,), None),
            ((s.REVOKING,), (e.PEER_LOST, e.CONSUMED, e.REFUSED, e.REVOKE_TIMER), (s.GONE,)),
        ]
    )


def _decode_table() -> Table[DecodeState, DecodeEvent]:
    s, e = DecodeState, DecodeEvent
    return _table(
        [
            ((s.GONE,), (e.HANDOFF,), (s.EARLY,)),
            ((s.GONE,), (e.REQUEST,), (s.WAITING,)),
            ((s.EARLY,), (e.HANDOFF,), None),
            ((s.EARLY,), (e.REQUEST,), (s.WAITING,)),
            ((s.EARLY,), (e.EARLY_TIMER, e.REVOKE, e.ROUTER_GONE, e.DRAIN_DEADLINE), (s.GONE,)),
            ((s.WAITING, s.RESERVED), (e.HANDOFF,), None),
            ((s.WAITING,), (e.BAD_HANDOFF, e.CANNOT_SERVE), (s.GONE,)),
            ((s.WAITING,), (e.RESERVED,), (s.RESERVED,)),
            ((s.WAITING,), (e.ADMITTED,), (s.RUNNING,)),
            ((s.WAITING,), (e.ABORT, e.DEADLINE, e.ROUTER_GONE, e.DRAIN_DEADLINE, e.REVOKE), (s.GONE,)),
            ((s.RESERVED,), (e.PULL_STARTED, e.PULL_VERIFIED), None),
            ((s.RESERVED,), (e.PULL_FAILED,), (s.GONE,)),
            ((s.RESERVED,), (e.ARRIVED,), (s.RUNNING,)),
            # DRAINING while a pull is in flight, GONE otherwise.
            (
                (s.RESERVED,),
                (e.BAD_HANDOFF, e.ABORT, e.DEADLINE, e.ROUTER_GONE, e.DRAIN_DEADLINE, e.REVOKE),
                (s.DRAINING, s.GONE),
            ),
            # Its destination begins with blocks that the failed step was to fill: found by name while they were being
            # computed.
            ((s.RESERVED,), (e.STEP_FAILED,), (s.DRAINING, s.GONE)),
            ((s.DRAINING,), (e.PULL_ENDED,), (s.GONE,)),
            ((s.RUNNING,), (e.FINISHED, e.STEP_FAILED, e.RETURNED), (s.GONE,)),
            ((s.RUNNING,), (e.ABORT, e.DEADLINE, e.ROUTER_GONE, e.DRAIN_DEADLINE), (s.GONE,)),
        ]
    )


PREFILL_TABLE = _prefill_table()
DECODE_TABLE = _decode_table()

PREFILL_TIMERS: Mapping[PrefillState, frozenset[PrefillTimer]] = {
    PrefillState.GONE: frozenset(),
    PrefillState.WAITING: frozenset({"deadline"}),
    PrefillState.RUNNING: frozenset({"deadline"}),
    PrefillState.LEASED: frozenset({"lease"}),
    PrefillState.REVOKING: frozenset({"revoke"}),
}
"""Timers that may run in a state. What waits for another process's answer has one: LEASED for decode's release,
REVOKING for its refusal. WAITING and RUNNING end by this engine's own steps.
"""

DECODE_TIMERS: Mapping[DecodeState, frozenset[DecodeTimer]] = {
    DecodeState.GONE: frozenset(),
    DecodeState.EARLY: frozenset({"early"}),
    DecodeState.WAITING: frozenset({"deadline", "renew"}),
    DecodeState.RESERVED: frozenset({"deadline", "renew", "pull"}),
    DecodeState.DRAINING: frozenset({"pull"}),
    DecodeState.RUNNING: frozenset({"deadline"}),
}
"""Timers that may run in a state. The pull's own timer runs in every state that a pull may write in, so that one that
never ends by itself is asked to.
"""
