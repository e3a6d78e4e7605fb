"""The transition tables, row by row against the handoff protocol's own tables of the prefill and the decode side."""

import itertools

import pytest

from kv_transfer.state import DECODE_TABLE, PREFILL_TABLE, DecodeEvent, DecodeState, PrefillEvent, PrefillState, advance
from protocol.errors import ProtocolError

# states | events | next states; "same" stays where it is. One line per row of the protocol, in its order.
PREFILL_ROWS = """
gone                     | request                              | waiting
waiting                  | cannot_serve                         | gone
waiting                  | admitted                             | running
running                  | chunk                                | same
running                  | last_chunk                           | leased revoking gone
waiting                  | abort deadline router_gone           | gone
running                  | abort router_gone deadline           | gone revoking
leased                   | abort router_gone                    | revoking
running                  | drain_deadline                       | gone revoking
leased                   | drain_deadline                       | revoking
waiting                  | drain_deadline                       | gone
revoking                 | abort                                | same
running leased revoking  | peer_lost                            | gone
leased revoking          | consumed                             | gone
running leased           | refused                              | gone
revoking                 | refused                              | gone
leased                   | lease_timer                          | gone
revoking                 | revoke_timer                         | gone
running                  | step_failed                          | gone revoking
"""

DECODE_ROWS = """
gone                     | handoff                              | early
gone                     | request                              | waiting
early                    | handoff                              | same
early                    | request                              | waiting
early                    | early_timer                          | gone
early                    | revoke router_gone                   | gone
waiting reserved         | handoff                              | same
waiting                  | bad_handoff                          | gone
reserved                 | bad_handoff                          | gone draining
waiting                  | cannot_serve                         | gone
waiting                  | reserved                             | reserved
waiting                  | admitted                             | running
reserved                 | pull_started                         | same
reserved                 | pull_verified                        | same
reserved                 | arrived                              | running
reserved                 | pull_failed                          | gone
waiting                  | abort router_gone revoke             | gone
reserved                 | abort router_gone revoke             | gone draining
waiting                  | deadline                             | gone
reserved                 | deadline                             | gone draining
draining                 | pull_ended                           | gone
running                  | finished                             | gone
running                  | returned                             | gone
early waiting running    | drain_deadline                       | gone
reserved                 | drain_deadline                       | gone draining
running                  | abort router_gone deadline           | gone
running                  | step_failed                          | gone
reserved                 | step_failed                          | gone draining
"""


def rows(text: str) -> dict[tuple[str, str], frozenset[str]]:
    table: dict[tuple[str, str], frozenset[str]] = {}
    for line in text.strip().splitlines():
        states, events, following = (part.split() for part in line.split("|"))
        for state, event in itertools.product(states, events):
            assert (state, event) not in table
            table[state, event] = frozenset(following) if following != ["same"] else frozenset({state})
    return table


def test_the_prefill_table_is_the_protocol_s() -> None:
    assert {(str(s), str(e)): frozenset(map(str, n)) for (s, e), n in PREFILL_TABLE.items()} == rows(PREFILL_ROWS)


def test_the_decode_table_is_the_protocol_s() -> None:
    assert {(str(s), str(e)): frozenset(map(str, n)) for (s, e), n in DECODE_TABLE.items()} == rows(DECODE_ROWS)


def test_every_pair_is_either_listed_or_an_error() -> None:
    for state, event in itertools.product(PrefillState, PrefillEvent):
        for to in PrefillState:
            if to in PREFILL_TABLE.get((state, event), ()):
                assert advance(PREFILL_TABLE, state, event, to) is to
            else:
                with pytest.raises(ProtocolError):
                    advance(PREFILL_TABLE, state, event, to)
    for d_state, d_event in itertools.product(DecodeState, DecodeEvent):
        for d_to in DecodeState:
            if d_to in DECODE_TABLE.get((d_state, d_event), ()):
                assert advance(DECODE_TABLE, d_state, d_event, d_to) is d_to
            else:
                with pytest.raises(ProtocolError):
                    advance(DECODE_TABLE, d_state, d_event, d_to)


def test_the_outcome_may_be_left_out_where_only_one_is_listed() -> None:
    assert advance(DECODE_TABLE, DecodeState.WAITING, DecodeEvent.RESERVED) is DecodeState.RESERVED
    with pytest.raises(ProtocolError, match="abort in state reserved leads to draining, gone: name one"):
        advance(DECODE_TABLE, DecodeState.RESERVED, DecodeEvent.ABORT)
    with pytest.raises(ProtocolError, match="consumed in state running is listed in no table"):
        advance(PREFILL_TABLE, PrefillState.RUNNING, PrefillEvent.CONSUMED)


def test_every_state_can_be_left_and_every_state_can_end() -> None:
    """No attempt can be caught: from everywhere a path leads to GONE."""
    for table, states, gone in (
        (PREFILL_TABLE, PrefillState, PrefillState.GONE),
        (DECODE_TABLE, DecodeState, DecodeState.GONE),
    ):
        ending = {str(gone)}
        for _ in states:
            ending |= {
                str(state) for (state, _), following in table.items() if any(str(to) in ending for to in following)
            }
        assert ending == {str(state) for state in states}
