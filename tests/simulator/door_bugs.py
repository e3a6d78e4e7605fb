"""Bugs of doors and of the core's end of them. Each function plants one, for test_planted_bugs.py."""

import pytest

from protocol.messages import Address, TokenLogprobs
from router import doors
from router.door_link import DoorLink
from router.doors import Doors, _Door


def calls_of_a_dead_door_go_on(patch: pytest.MonkeyPatch) -> None:
    def door_down(self: Doors, address: Address) -> None:
        if self._doors.pop(address, None) is not None:
            self._core.release(address)

    patch.setattr(Doors, "door_down", door_down)


def steps_that_merge_leave_out_the_later(patch: pytest.MonkeyPatch) -> None:
    original = _Door.add

    def add(self: _Door, number: int, token_ids: list[int], logprobs: tuple[TokenLogprobs, ...]) -> None:
        original(self, number, [] if number in self.tokens else token_ids, logprobs)

    patch.setattr(_Door, "add", add)


def any_number_of_batches_is_on_the_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doors, "MAX_BATCHES", 1 << 30)


def full_doors_get_new_work(patch: pytest.MonkeyPatch) -> None:
    def hold_or_release(self: Doors, door: _Door) -> None: ...

    patch.setattr(Doors, "_hold_or_release", hold_or_release)


def answers_outlive_their_core(patch: pytest.MonkeyPatch) -> None:
    def down(self: DoorLink) -> None:
        self._up = False

    patch.setattr(DoorLink, "down", down)
