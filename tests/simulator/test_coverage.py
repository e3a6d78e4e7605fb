"""The drawn faults reach every state. Over many seeds, the tests count which rows of both tables were taken, and in
which states cancels and deadlines hit.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import decode_pool.service
import prefill_pool.service
from kv_transfer.state import DECODE_TABLE, PREFILL_TABLE, advance
from kv_transfer.state import DecodeEvent as D
from kv_transfer.state import DecodeState as InDecode
from kv_transfer.state import PrefillEvent as P
from kv_transfer.state import PrefillState as InPrefill
from protocol.errors import DeadlineExceeded, RequestCancelled, RequestError
from protocol.messages import FinishReason
from router.request import ActiveRequest
from router.router import Router
from simulator.scenario import ALL_FAULTS, drawn
from simulator.simulation import Simulation

NUM_SEEDS = 150
FAULTS = replace(ALL_FAULTS, cancel=0.3, deadline=0.6, step_failure=0.05, kills=3, router_kills=3, drains=3)

NOT_REACHED = {
    # A router that dies between a handoff and its request is too rare here. The service's own tests have this row.
    (InDecode.EARLY, D.ROUTER_GONE),
    # That a request finds blocks which a failing step of another one computes happens once in 300 runs in which every
    # fifth step fails. The service's own tests have this row.
    (InDecode.RESERVED, D.STEP_FAILED),
    # Both pools of a simulated run have the same layout.
    *((state, D.BAD_HANDOFF) for state in InDecode),
}


@dataclass
class Counted:
    """How often each row, (state, event), was taken, and how often requests ended with each (state in the
    router, error).
    """

    prefill: Counter[tuple[str, str]] = field(default_factory=Counter)
    decode: Counter[tuple[str, str]] = field(default_factory=Counter)
    router: Counter[tuple[str, str]] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def counted() -> Counted:
    counted = Counted()
    close = Router._close

    def counting(rows: Counter[tuple[str, str]]) -> Callable[..., Any]:
        def count(table: Any, state: Any, event: Any, to: Any = None) -> Any:
            rows[state, event] += 1
            return advance(table, state, event, to)

        return count

    def closing(
        self: Router, entry: ActiveRequest, finish_reason: FinishReason | None, error: RequestError | None
    ) -> None:
        counted.router["queued" if entry.key is None else "active", type(error).__name__] += 1
        close(self, entry, finish_reason, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_pool.service, "advance", counting(counted.prefill))
        patch.setattr(decode_pool.service, "advance", counting(counted.decode))
        patch.setattr(Router, "_close", closing)
        logging.disable(logging.WARNING)
        for seed in range(1, NUM_SEEDS + 1):
            Simulation(drawn(seed, num_prefill=1 + seed % 2, num_decode=2, num_requests=30, faults=FAULTS)).run()
        logging.disable(logging.NOTSET)
    return counted


def lacking(rows: Counter[tuple[str, str]], wanted: list[tuple[Any, Any]]) -> list[tuple[str, str]]:
    print("\n" + "\n".join(f"{rows[row]:6} {row[0]:9} {row[1]}" for row in wanted))
    return [row for row in wanted if not rows[row]]


def test_every_row_of_the_prefill_table_is_taken(counted: Counted) -> None:
    assert lacking(counted.prefill, list(PREFILL_TABLE)) == []


def test_every_row_of_the_decode_table_is_taken(counted: Counted) -> None:
    assert lacking(counted.decode, [row for row in DECODE_TABLE if row not in NOT_REACHED]) == []


def test_cancels_and_deadlines_hit_in_every_state_of_the_router(counted: Counted) -> None:
    errors = (RequestCancelled.__name__, DeadlineExceeded.__name__)
    assert lacking(counted.router, [(state, error) for state in ("queued", "active") for error in errors]) == []


def test_cancels_and_deadlines_hit_in_every_state_of_an_engine(counted: Counted) -> None:
    """DRAINING ignores both; EARLY and GONE know no request; LEASED and REVOKING have no deadline of their own, since
    the router's deadline ends them.
    """
    aborts = [(state, P.ABORT) for state in InPrefill if state is not InPrefill.GONE]
    deadlines = [(state, P.DEADLINE) for state in (InPrefill.WAITING, InPrefill.RUNNING)]
    assert lacking(counted.prefill, [*aborts, *deadlines]) == []
    open_states = (InDecode.WAITING, InDecode.RESERVED, InDecode.RUNNING)
    assert lacking(counted.decode, [(state, event) for state in open_states for event in (D.ABORT, D.DEADLINE)]) == []
