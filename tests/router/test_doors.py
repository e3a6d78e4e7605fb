"""The core's end of the doors, around a real router whose engines are played by the test."""

from typing import Any

import numpy as np
import pytest

from protocol.errors import InvalidRequest, Overloaded, RequestFailed
from protocol.messages import AbortRequest, Address, EngineRequest, Logprobs, SamplingParams, TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.door_messages import (
    Abort,
    Aborted,
    AskLoads,
    Batch,
    Cancel,
    Counted,
    DoorMessage,
    Facts,
    Opened,
    Stop,
    Submit,
    Taken,
)
from router.doors import FULL_BUFFERS, MAX_BATCHES, Doors
from router.metrics_totals import DoorTotals
from tests.router.router_world import D, World

A, B = Address("door-0", 7), Address("door-1", 8)


def request(name: str, **changes: Any) -> ClientRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": np.array([7, 8, 9], np.int32),
        "max_tokens": 50,
        "sampling": SamplingParams(),
    }
    return ClientRequest(**(fields | changes))


class Doorway(World):
    """Two doors, A and B, in front of a router with one decode engine, D."""

    def __init__(self, **config: Any) -> None:
        super().__init__(prefill=False, **config)
        self.doors = Doors(self.router, RouterConfig(**config), self.clock)
        for door in (A, B):
            self.doors.door_up(door)
            (batch,) = self.batches(door)
            assert batch.facts == Facts(ready=True, max_model_len=64)
            self.take(door, Taken(batch.seq))

    def take(self, door: Address, message: DoorMessage) -> None:
        self.doors.take(door, message)
        self.doors.collect()

    def say(self, sender: Address, message: Any) -> None:
        super().say(sender, message)
        if hasattr(self, "doors"):
            self.doors.collect()

    def batches(self, door: Address) -> list[Batch]:
        self.doors.collect()
        batches = [batch for to, batch in self.doors.outbox if to == door]
        self.doors.outbox[:] = [(to, batch) for to, batch in self.doors.outbox if to != door]
        return batches

    def batch(self, door: Address) -> Batch:
        (batch,) = self.batches(door)
        return batch

    def call(self, door: Address, first: int, name: str) -> None:
        """Opens a call with one answer."""
        self.take(door, Submit(first, name, (request(name),)))
        batch = self.batch(door)
        assert batch.opened == (Opened(first, None),)
        self.take(door, Taken(batch.seq))


def refusal(batch: Batch) -> Any:
    (opened,) = batch.opened
    return opened.refusal


def test_each_door_gets_its_own_tokens_and_ends() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    w.call(B, 0, "b")
    w.tokens(D, 0, [1, 2], request_number=0)
    w.tokens(D, 0, [3], ("finished", "stop"), request_number=1)
    to_a, to_b = w.batch(A), w.batch(B)
    assert (to_a.tokens, to_a.ended) == ({0: [1, 2]}, ())
    assert to_b.tokens == {0: [3]}
    ((number, ended),) = to_b.ended
    assert (number, ended.finish_reason) == (0, "stop")


def test_a_busy_door_has_two_batches_and_the_rest_is_joined_in_order() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    w.call(A, 1, "b")
    values = [TokenLogprobs(-0.5 * i) for i in range(9)]
    w.take(A, Submit(2, "c", (request("c", sampling=SamplingParams(logprobs=0)),)))
    w.take(A, Taken(w.batch(A).seq))
    for offset in range(6):
        w.tokens(D, offset, [10 + offset], request_number=0)
        w.tokens(D, offset, [30 + offset], request_number=2, logprobs=(Logprobs(2, 1, offset, values[offset]),))
    first, second = w.batches(A)
    assert MAX_BATCHES == 2 and (first.tokens, second.tokens) == ({0: [10]}, {2: [30]})
    w.tokens(D, 6, [16], ("finished", "length"), request_number=0)
    w.tokens(D, 0, [20], request_number=1)
    assert w.batches(A) == []
    w.take(A, Taken(second.seq))
    joined = w.batch(A)
    assert joined.seq == second.seq + 1
    assert joined.tokens == {0: [11, 12, 13, 14, 15, 16], 2: [31, 32, 33, 34, 35], 1: [20]}
    assert joined.logprobs == {2: values[1:6]}
    assert [number for number, _ in joined.ended] == [0]
    assert w.doors.num_waiting_tokens(A) == 12
    w.take(A, Taken(joined.seq))
    assert w.doors.num_waiting_tokens(A) == 0


def test_a_name_is_taken_while_its_call_is_open_at_any_door() -> None:
    w = Doorway()
    w.call(A, 0, "mine")
    w.take(B, Submit(0, "mine", (request("mine 0"), request("mine 1"))))
    assert isinstance(refusal(w.batch(B)), InvalidRequest)
    w.take(B, Taken(1))
    w.tokens(D, 0, [1], ("finished", "stop"))
    w.call(B, 2, "mine")


def test_messages_that_come_again_or_too_late_or_for_nobody_are_ignored() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    w.take(A, Submit(0, "a", (request("a"),)))
    w.take(A, Cancel((5,)))
    w.take(A, Stop(5))
    w.take(B, Cancel((0,)))
    w.take(A, Taken(0))
    w.take(Address("door-0", 6), Cancel((0,)))
    w.take(Address("door-9", 9), Submit(0, "x", (request("x"),)))
    assert w.batches(A) == w.batches(B) == []
    assert w.router.num_open == 1


def test_cancel_stop_and_abort_end_answers() -> None:
    w = Doorway()
    for first, name in enumerate(("a", "b", "c")):
        w.call(A, first, name)
    w.take(A, Cancel((0,)))
    w.take(A, Stop(1))
    ends = dict(end for batch in w.batches(A) for end in batch.ended)
    assert (str(ends[0].error), ends[1].finish_reason) == ("cancelled by the client", "stop")
    w.take(A, Taken(9))
    w.take(B, Abort(4, "c"))
    assert [number for number, _ in w.batch(A).ended] == [2]
    assert w.batch(B).aborted == (Aborted(4, True),)
    w.take(B, Abort(5, "c"))
    assert w.batch(B).aborted == (Aborted(5, False),)
    assert w.router.num_open == 0


def test_loads_are_told_when_asked_without_the_hashes_of_the_caches() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    next(iter(w.router.replicas())).hashes.add(b"h")
    w.clock.advance_to(2.0)
    w.take(B, AskLoads(3))
    (loads,) = w.batch(B).loads
    ((view, age_s),) = loads.replicas
    assert (loads.ask, loads.num_open, loads.num_queued, age_s) == (3, 1, 0, 2.0)
    assert (view.address, view.in_flight, view.hashes) == (D, 1, set())


def test_facts_go_out_once_when_they_have_changed() -> None:
    w = Doorway()
    w.doors.tick()
    assert w.batches(A) == []
    w.router.drain(1.0)
    w.doors.tick()
    for door in (A, B):
        assert w.batch(door).facts == Facts(ready=False, max_model_len=64)
    w.doors.tick()
    assert w.batches(A) == []


def test_a_door_that_dies_loses_its_own_calls_alone() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    w.call(A, 1, "b")
    w.call(B, 0, "c")
    w.sent()
    w.doors.door_down(A)
    w.tokens(D, 0, [1], request_number=2)
    aborted = [(to, message.key.request_id, message.reason) for to, message in w.sent(AbortRequest)]
    assert aborted == [(D, "a", "client"), (D, "b", "client")]
    assert w.router.num_open == 1
    assert w.batches(A) == [] and w.batch(B).tokens == {0: [1]}
    w.doors.door_down(A)
    again = Address("door-0", 9)
    w.doors.door_up(again)
    assert w.batch(again).seq == 0
    w.call(again, 0, "a")


def test_a_new_epoch_of_a_door_ends_the_old_one() -> None:
    w = Doorway()
    w.call(A, 0, "a")
    w.doors.door_up(Address("door-0", 9))
    assert w.router.num_open == 0 and w.batches(A) == []


def full_door(**config: Any) -> Doorway:
    """Door A has handled nothing since both seats and places of the engine got a request of it; one waits, one of B's
    behind it.
    """
    w = Doorway(max_buffered_tokens=4, **config)
    for first in range(11):
        w.call(A, first, f"a{first}")
    w.call(B, 0, "b")
    assert [message.key.request_id for _, message in w.sent(EngineRequest)] == [f"a{i}" for i in range(10)]
    for offset in range(FULL_BUFFERS * 4 + 1):
        w.tokens(D, offset, [offset], request_number=0)
    return w


def test_while_a_door_is_full_its_queued_requests_wait_and_others_pass() -> None:
    w = full_door()
    w.tokens(D, 0, [5], ("finished", "stop"), request_number=1)
    w.tokens(D, 0, [5], ("finished", "stop"), request_number=2)
    assert [message.key.request_id for _, message in w.sent(EngineRequest)] == ["b"]
    assert w.router.num_queued == 1
    w.take(A, Taken(99))
    w.take(A, Taken(99))
    assert [message.key.request_id for _, message in w.sent(EngineRequest)] == ["a10"]


def test_a_full_door_is_refused_new_requests_and_others_are_not() -> None:
    w = full_door()
    (*_, last) = w.batches(A)
    w.take(A, Submit(11, "more", (request("more"),)))
    w.call(B, 1, "b1")
    w.take(A, Taken(last.seq))
    error = refusal(w.batch(A))
    assert isinstance(error, Overloaded) and "the door is behind" in str(error)
    w.take(A, Taken(99))
    w.call(A, 12, "more")


def test_what_comes_back_to_a_full_door_waits_too() -> None:
    w = full_door()
    w.tokens(D, 0, [], ("failed", None, "x"), request_number=3)
    w.tokens(D, 0, [5], ("finished", "stop"), request_number=1)
    assert [message.key.request_id for _, message in w.sent(EngineRequest)] == ["b"]
    w.take(A, Taken(99))
    w.take(A, Taken(99))
    assert "a3" in [message.key.request_id for _, message in w.sent(EngineRequest)]


def test_queued_requests_of_a_full_door_that_dies_go() -> None:
    w = full_door()
    w.doors.door_down(A)
    assert [entry.request.request_id for entry in w.router.active()] == ["b"]
    assert w.router.num_open == 1


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_held_request_can_end_while_it_waits(end: str) -> None:
    w = full_door(queue_ttl_s=2.0)
    (*_, last) = w.batches(A)
    if end == "cancel":
        w.take(A, Cancel((10,)))
    else:
        w.clock.advance_to(3.0)
        w.router.tick()
    w.take(A, Taken(last.seq))
    assert [number for number, _ in w.batch(A).ended] == [10]
    w.take(A, Taken(99))
    w.call(A, 11, "a10")


def test_a_refusal_of_the_router_reaches_the_door() -> None:
    w = Doorway()
    w.router.replica_down(D)
    w.take(A, Submit(0, "a", (request("a"),)))
    assert isinstance(refusal(w.batch(A)), RequestFailed)


def test_counts_of_all_doors_are_added_and_a_dead_doors_open_calls_have_failed() -> None:
    w = Doorway()
    counted = DoorTotals()
    counted.finished("stop", "colocated", 2.0, {"decode": 1.5, "deliver": 0.5})
    counted.first_token.observe(0.5)
    counted.refused(Overloaded("full", retry_after_s=1.0), 3)
    counts = counted.counts()
    assert counts is not None and DoorTotals().counts() is None
    w.call(A, 0, "a")
    for door in (A, B):
        w.take(door, Counted(counts))
    w.doors.door_down(A)
    totals = w.doors.totals
    assert {word: count for word, count in totals.ends.items() if count} == {"stop": 2, "failed": 1}
    assert (totals.refusals["queue_full"], totals.paths["colocated"]) == (6, 2)
    assert (totals.total.now.total, totals.first_token.now.total) == (4.0, 1.0)
    assert {stage: seconds.now.total for stage, seconds in totals.stages.items()} == {"decode": 3.0, "deliver": 1.0}
