"""Requests in lockstep get the same tokens, and the same counts, as requests whose rows are taken one by one."""

import random
from typing import Any

import numpy as np
import pytest

from protocol.errors import ProtocolError
from protocol.messages import Address, End, SamplingParams, StepTokens
from router.lockstep import Lockstep
from router.request import ActiveRequest, Delivered
from tests.router.router_world import D, P, World


@pytest.fixture
def advances(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records for each message how many requests went on in lockstep."""
    seen: list[int] = []

    def advance(self: Lockstep, message: StepTokens, now: float) -> Delivered:
        seen.append(len(message.request_numbers))
        return original(self, message, now)

    original = Lockstep.advance
    monkeypatch.setattr(Lockstep, "advance", advance)
    return seen


class Decoding:
    """Requests that decode together. `step` brings the next token of each."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.world = World()
        self.request_numbers = list(range(len(names)))
        for name in names:
            self.world.submit(name, max_tokens=40, **changes)
        self.offset = 0

    def step(
        self,
        *,
        request_numbers: list[int] | None = None,
        offset: int | None = None,
        ends: tuple[End, ...] = (),
        sender: Address = D,
    ) -> None:
        request_numbers = self.request_numbers if request_numbers is None else request_numbers
        start = self.offset if offset is None else offset
        self.offset += offset is None
        ones = np.ones(len(request_numbers), np.int32)
        self.world.clock.now += 0.01
        message = StepTokens(
            router_epoch=3,
            request_numbers=np.array(request_numbers, np.int64),
            attempts=ones,
            offsets=ones * start,
            counts=ones,
            token_ids=np.array([100 * request_number + start for request_number in request_numbers], np.int32),
            ends=ends,
        )
        self.world.say(sender, message)

    def answers(self) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        for event in self.world.router.events:
            if isinstance(event, Delivered):
                for name, token_ids in event.rows():
                    answers.setdefault(name, []).extend(token_ids)
        return answers


def test_one_event_brings_a_whole_step(advances: list[int]) -> None:
    decoding = Decoding("a", "b")
    for _ in range(3):
        decoding.step()
    assert advances == [2, 2]
    assert len(decoding.world.router.events) == 3
    assert decoding.answers() == {"a": [0, 1, 2], "b": [100, 101, 102]}
    assert decoding.world.router.counters["delivered_tokens"] == 6
    gaps = decoding.world.router.inter_token.now
    assert sum(gaps.counts) == 4
    assert gaps.total == pytest.approx(0.04)


def test_what_befalls_one_request_ends_it(advances: list[int]) -> None:
    decoding = Decoding("a", "b")
    decoding.step()
    decoding.world.router.cancel("a")
    decoding.step()
    assert not advances
    assert decoding.world.router.counters["ignored"] == 1
    assert decoding.answers() == {"a": [0], "b": [100, 101]}


def test_the_end_of_one_comes_after_its_last_token(advances: list[int]) -> None:
    decoding = Decoding("a", "b")
    decoding.step()
    decoding.step(ends=(End(0, 1, "finished", "length"),))
    decoding.step(request_numbers=[1])
    decoding.step(request_numbers=[1])
    assert advances == [2, 1]
    assert decoding.answers() == {"a": [0, 1], "b": [100, 101, 102, 103]}
    assert decoding.world.ended().usage.completion_tokens == 2


@pytest.mark.parametrize("changes", [{"offset": 1}, {"request_numbers": [1, 0]}, {"request_numbers": [0]}])
def test_another_message_is_read_row_by_row(advances: list[int], changes: dict[str, Any]) -> None:
    decoding = Decoding("a", "b")
    decoding.step()
    decoding.step()
    decoding.step(**changes)
    assert advances == [2]
    assert decoding.world.router.counters["repeated_tokens"] == (2 if "offset" in changes else 0)


@pytest.mark.parametrize("changes", [{"sender": P, "request_numbers": [0]}, {"request_numbers": [0, 7]}])
def test_a_token_that_came_another_way_is_not_delivered_again(advances: list[int], changes: dict[str, Any]) -> None:
    decoding = Decoding("a", "b")
    decoding.step()
    decoding.step(offset=1, **changes)
    decoding.step()
    assert not advances
    assert decoding.answers() == {"a": [0, 1], "b": [100, 101]}


def test_a_gap_is_still_a_bug() -> None:
    decoding = Decoding("a", "b")
    decoding.step()
    with pytest.raises(ProtocolError, match="tokens start at 2, only 1 were delivered"):
        decoding.step(offset=2)


def test_neither_prefill_nor_a_request_with_logprobs_goes_in_lockstep(advances: list[int]) -> None:
    decoding = Decoding("a", "b")
    decoding.step(sender=P)
    decoding.step(sender=P)
    assert decoding.answers() == {"a": [0, 1], "b": [100, 101]}
    decoding = Decoding("a", "b", sampling=SamplingParams(logprobs=0))
    with pytest.raises(ProtocolError, match="logprobs of 0 tokens"):
        decoding.step()
    assert not advances


def test_a_request_named_twice_does_not_go_in_lockstep(advances: list[int]) -> None:
    decoding = Decoding("a", "b")
    decoding.step(request_numbers=[0])
    both = np.array([0, 0], np.int64)
    ones = np.ones(2, np.int32)
    for offset in (1, 2):
        offsets = np.array([offset, offset + 1], np.int32)
        decoding.world.say(
            D,
            StepTokens(
                router_epoch=3, request_numbers=both, attempts=ones, offsets=offsets, counts=ones, token_ids=offsets
            ),
        )
    assert not advances
    assert decoding.answers() == {"a": [0, 1, 2, 3]}


def played(seed: int) -> tuple[list[Any], dict[str, float], Any]:
    """Returns a router's events, counters and gaps after 300 random messages and events."""
    draw, world = random.Random(seed), World(max_queue=64)
    said: list[Any] = []

    def active() -> list[ActiveRequest]:
        return sorted(world.router.active(), key=lambda entry: entry.request_number)

    for number in range(300):
        world.clock.now += draw.choice([0.0, 0.01])
        rows = [(entry.request_number, entry.attempt, len(entry.delivered)) for entry in active() if entry.decode == D]
        if number < 5 or draw.random() < 0.05:
            world.submit(f"r{number}", max_tokens=500)
            continue
        if rows and draw.random() < 0.05:
            world.router.cancel(draw.choice(active()).request.request_id)
        elif draw.random() < 0.03:
            world.router.replica_lost(D)
            world.hello(D, "decode")
        elif rows:
            if draw.random() < 0.1:
                draw.shuffle(rows)
            starts = [known - (known > 0 and draw.random() < 0.02) for _, _, known in rows]
            counts = [1 + (draw.random() < 0.02) for _ in rows]
            ends = tuple(
                End(request_number, attempt, draw.choice(["finished", "failed"]), "stop")
                for request_number, attempt, _ in rows
                if draw.random() < 0.01
            )
            message = StepTokens(
                router_epoch=3,
                request_numbers=np.array([request_number for request_number, _, _ in rows], np.int64),
                attempts=np.array([attempt for _, attempt, _ in rows], np.int32),
                offsets=np.array(starts, np.int32),
                counts=np.array(counts, np.int32),
                token_ids=np.arange(sum(counts), dtype=np.int32) + number,
                ends=ends,
            )
            world.say(P if draw.random() < 0.05 else D, message)
        for event in world.router.events:
            said += event.rows() if isinstance(event, Delivered) else [event[:2]]
        world.router.events.clear()
    gaps = world.router.inter_token.now
    return said, world.router.counters, (gaps.counts, round(gaps.total, 6))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_between_steps(seed: int, advances: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    in_lockstep = played(seed)
    assert len(advances) > 30
    monkeypatch.setattr(Lockstep, "begin", lambda *arguments: None)
    num_advances = len(advances)
    assert played(seed) == in_lockstep
    assert len(advances) == num_advances
