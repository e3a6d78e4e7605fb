"""Bugs between doors and core. Each function plants one, for test_planted_bugs.py."""

from dataclasses import replace

import pytest

from protocol.messages import Address, TokenLogprobs
from router.admission import AdmissionQueue
from router.door_link import DoorLink
from router.door_messages import Batch
from router.doors import Doors, _Door


def calls_of_a_dead_door_go_on(patch: pytest.MonkeyPatch) -> None:
    def door_down(self: Doors, address: Address) -> None:
        self._doors.pop(address, None)

    patch.setattr(Doors, "door_down", door_down)


def successor_gets_what_was_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    original = Doors.door_up

    def door_up(self: Doors, address: Address) -> None:
        heirs = {name: door for name, door in self._doors.items() if door.address.replica_id == address.replica_id}
        for name in heirs:
            del self._doors[name]
        original(self, address)
        for door in heirs.values():
            door.address = address
            self._doors[address] = door

    patch.setattr(Doors, "door_up", door_up)


def joined_step_dropped(patch: pytest.MonkeyPatch) -> None:
    original = _Door.add

    def add(self: _Door, number: int, token_ids: list[int], logprobs: tuple[TokenLogprobs, ...]) -> None:
        if number in self.tokens:
            self.num_new_tokens += len(token_ids)
            self.num_waiting_tokens += len(token_ids)
        else:
            original(self, number, token_ids, logprobs)

    patch.setattr(_Door, "add", add)


def batches_without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("router.doors.MAX_BATCHES", 1 << 20)


def full_door_is_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Doors, "_hold_or_release", lambda self, door: None)


def requests_of_a_held_door_begin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmissionQueue, "park", lambda self, request_number: None)
    patch.setattr(AdmissionQueue, "unpark", lambda self, request_number: None)


def end_overtakes_the_last_tokens(patch: pytest.MonkeyPatch) -> None:
    original = _Door.next_batch

    def next_batch(self: _Door) -> Batch | None:
        ended, self.ended = self.ended, []
        batch = original(self)
        if batch is None:
            self.ended = ended
            return None
        finished = {number for number, _ in ended}
        self.tokens = {number: tokens for number, tokens in batch.tokens.items() if number in finished}
        return replace(batch, tokens={n: t for n, t in batch.tokens.items() if n not in finished}, ended=tuple(ended))

    patch.setattr(_Door, "next_batch", next_batch)


def end_of_the_core_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    def down(self: DoorLink) -> None:
        self._up = False
        self._receivers.clear()
        self._opening.clear()

    patch.setattr(DoorLink, "down", down)
