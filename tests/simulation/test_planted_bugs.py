"""A check that cannot fail checks nothing: each planted bug must be caught by the simulator within 200 seeds."""

from collections.abc import Callable
from typing import Any

import pytest

from bench.invariants import Violation
from bench.simulator import run_seeds
from decode_pool.pulls import Pulls
from decode_pool.service import Decode, DecodeService
from engine import admission
from engine.scheduler_state import SchedulerState
from engine.sequence import Sequence
from kv_transfer.state import DecodeEvent
from prefill_pool.service import PrefillService
from protocol.errors import PullFailed, RequestCancelled, RequestError
from protocol.messages import Address, EndKind, Envelope, FinishReason, Int32, KVRelease, KVRenew
from router.request import Open, Tokens
from router.router import Router

Patch = Callable[[pytest.MonkeyPatch], None]


def free_at_abort_while_a_pull_runs(patch: pytest.MonkeyPatch) -> None:
    def leave(self: DecodeService, entry: Decode, event: DecodeEvent, kind: EndKind | None, reason: str = "") -> None:
        self._pulls._running.pop(entry.key, None)
        original(self, entry, event, kind, reason)

    original = DecodeService._leave
    patch.setattr(DecodeService, "_leave", leave)


def release_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillService, "_on_release", lambda self, envelope: None)


def router_does_not_deduplicate(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: Router, entry: Open, sender: Address, offset: int, token_ids: Int32, now: float) -> None:
        original(self, entry, sender, offset, token_ids[:0], now)
        entry.delivered.extend(token_ids.tolist())
        self.events.append(Tokens(entry.request.request_id, token_ids))

    original = Router._deliver
    patch.setattr(Router, "_deliver", deliver)


def lease_word_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pulls, "_verdict", lambda self, pull: PullFailed(pull.pending.error) if pull.pending.error else None)


def hashes_visible_before_verification(patch: pytest.MonkeyPatch) -> None:
    def reserve(state: SchedulerState, sequence: Sequence) -> bool:
        reserved = original(state, sequence)
        if reserved:
            end = sequence.num_first // state.config.block_size
            state.blocks.insert(sequence.chain[1 : end + 1], sequence.blocks[:end])
        return reserved

    original = admission._reserve
    patch.setattr(admission, "_reserve", reserve)


def release_sent_twice(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: DecodeService, peer: Address, key: Any, lease_id: int, reason: str) -> None:
        self.outbox.append((peer, KVRelease(key=key, lease_id=lease_id, outcome="consumed")))
        self.outbox.append((peer, KVRelease(key=key, lease_id=lease_id, outcome="refused", reason=reason)))

    patch.setattr(DecodeService, "_refuse", refuse)


def lease_not_renewed(patch: pytest.MonkeyPatch) -> None:
    original = DecodeService.tick

    def tick(self: DecodeService) -> None:
        original(self)
        self.outbox[:] = [(to, message) for to, message in self.outbox if not isinstance(message, KVRenew)]

    patch.setattr(DecodeService, "tick", tick)


def offer_to_a_replica_that_was_replaced(patch: pytest.MonkeyPatch) -> None:
    original = DecodeService.handle

    def handle(self: DecodeService, envelope: Envelope) -> None:
        original(self, envelope._replace(receiver=self.address))

    patch.setattr(DecodeService, "handle", handle)


def counter_not_decremented_on_reject(patch: pytest.MonkeyPatch) -> None:
    original = Router._failed

    def failed(self: Router, entry: Open, error: str) -> None:
        entry.prefill = None
        original(self, entry, error)

    patch.setattr(Router, "_failed", failed)


def deadline_only_checked_when_busy(patch: pytest.MonkeyPatch) -> None:
    original = DecodeService.tick

    def tick(self: DecodeService) -> None:
        if self._scheduler.num_running:
            original(self)

    patch.setattr(DecodeService, "tick", tick)


def retry_after_the_terminal_event(patch: pytest.MonkeyPatch) -> None:
    original = Router._close

    def close(self: Router, entry: Open, finish_reason: FinishReason | None, error: RequestError | None) -> None:
        key = entry.key
        original(self, entry, finish_reason, error)
        if isinstance(error, RequestCancelled) and key is not None:
            entry.key, entry.prefill, entry.decode = None, None, None
            self._open[entry.slot] = entry
            self._slots[entry.request.request_id] = entry.slot
            self._line.push(entry.slot, 0)

    patch.setattr(Router, "_close", close)


@pytest.mark.parametrize(
    "plant",
    [
        free_at_abort_while_a_pull_runs,
        release_ignored,
        router_does_not_deduplicate,
        lease_word_not_read,
        hashes_visible_before_verification,
        release_sent_twice,
        lease_not_renewed,
        offer_to_a_replica_that_was_replaced,
        counter_not_decremented_on_reject,
        deadline_only_checked_when_busy,
        retry_after_the_terminal_event,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bug_is_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        run_seeds(1, 200)
    print(f"\n{plant.__name__}: {caught.value}")
