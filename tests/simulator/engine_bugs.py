"""Bugs in the engines: their services, schedulers and links. Each function plants one, for test_planted_bugs.py."""

from typing import Any

import pytest

from decode_pool.pulls import Pulls
from decode_pool.service import Decode, DecodeService
from engine.runner import Batch, StepOutput
from engine.scheduler import admission, placement
from engine.scheduler.loops_sequences import ALLOWED
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request, Sequence
from engine.scheduler.state import SchedulerState
from engine.scheduler.step_counts import StepCounts
from kv_transfer.state import DecodeEvent, DecodeState, PrefillEvent
from prefill_pool.service import Prefill, PrefillService
from protocol.errors import PullFailed
from protocol.messages import Address, EndKind, Envelope, KVRelease, KVRenew, RequestKey
from protocol.router_link import ROUTER_SILENT, RouterLink


def free_at_abort_while_a_pull_runs(patch: pytest.MonkeyPatch) -> None:
    def leave(self: DecodeService, entry: Decode, event: DecodeEvent, kind: EndKind | None, reason: str = "") -> None:
        self._pulls._running.pop(entry.key, None)
        original(self, entry, event, kind, reason)

    original = DecodeService._leave
    patch.setattr(DecodeService, "_leave", leave)


def release_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillService, "_on_release", lambda self, envelope: None)


def lease_word_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pulls, "_verdict", lambda self, pull: PullFailed(pull.pending.error) if pull.pending.error else None)


def hashes_visible_before_verification(patch: pytest.MonkeyPatch) -> None:
    def reserve(state: SchedulerState, sequence: Sequence) -> bool:
        reserved = original(state, sequence)
        if reserved and state.config.enable_prefix_caching:
            end = sequence.num_first // state.config.block_size
            state.blocks.insert(sequence.chain[1 : end + 1], sequence.blocks[:end])
        return reserved

    original = admission._reserve
    patch.setattr(admission, "_reserve", reserve)


def release_sent_twice(patch: pytest.MonkeyPatch) -> None:
    def refuse(
        self: DecodeService, peer: Address, key: Any, lease_id: int, reason: str, *, router_knows: bool = True
    ) -> None:
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


def deadline_only_checked_when_busy(patch: pytest.MonkeyPatch) -> None:
    original = DecodeService.tick

    def tick(self: DecodeService) -> None:
        if self._scheduler.num_running:
            original(self)

    patch.setattr(DecodeService, "tick", tick)


def lease_ended_without_an_answer(patch: pytest.MonkeyPatch) -> None:
    def revoke(
        self: PrefillService, entry: Prefill, event: PrefillEvent, reason: str, *, report: EndKind | None
    ) -> None:
        original(self, entry, event, reason, report=report)
        self._forget(entry, PrefillEvent.REVOKE_TIMER)

    original = PrefillService._revoke
    patch.setattr(PrefillService, "_revoke", revoke)


def refused_after_it_was_consumed(patch: pytest.MonkeyPatch) -> None:
    def drop(self: DecodeService, entry: Decode, event: DecodeEvent, reason: str) -> None:
        if entry.handoff is not None and entry.source is not None:
            self._refuse(entry.source, entry.key, entry.handoff.lease_id, reason)
        self._forget(entry, event)

    patch.setattr(DecodeService, "_drop", drop)


def arrived_ones_wait_behind_the_line(patch: pytest.MonkeyPatch) -> None:
    def seat(state: SchedulerState, budget: int) -> int:
        return budget if len(state.waiting) else admission.seat_arrived(state, budget)

    patch.setattr("engine.scheduler.scheduler.seat_arrived", seat)


def arrived_ones_get_what_prompts_and_drafts_leave(patch: pytest.MonkeyPatch) -> None:
    def seat(state: SchedulerState, budget: int) -> int:
        num_promised = min(len(state.arrived), state.config.max_num_seqs - len(state.table))
        return admission.seat_arrived(state, budget - num_promised)

    patch.setattr(
        "engine.scheduler.scheduler.step_budget",
        lambda state, num_promised: placement.step_budget(state, 0) + num_promised,
    )
    patch.setattr("engine.scheduler.scheduler.seat_arrived", seat)


def destination_without_the_next_tokens_slot(patch: pytest.MonkeyPatch) -> None:
    def num_tokens(request: Request) -> int:
        return len(request.prompt_token_ids)

    patch.setattr(admission, "_num_destination_tokens", num_tokens)


def failed_steps_counted(patch: pytest.MonkeyPatch) -> None:
    def scheduled(self: StepCounts, batch: Batch) -> None:
        original(self, batch)
        self._counters["scheduled_tokens"] += batch.num_tokens

    def committed(self: StepCounts, batch: Batch, output: StepOutput) -> None:
        original_committed(self, batch, output)
        self._counters["scheduled_tokens"] -= batch.num_tokens

    original, original_committed = StepCounts.scheduled, StepCounts.committed
    patch.setattr(StepCounts, "scheduled", scheduled)
    patch.setattr(StepCounts, "committed", committed)


def drafts_before_the_next_answers_token(patch: pytest.MonkeyPatch) -> None:
    def ration(state: SchedulerState, budget: int, threshold: int) -> int:
        table = state.table
        for position in range(len(table)):
            num = min(int(table.goal[position] - table.computed[position]), threshold, budget)
            table.allowed[position] = table.computed[position] + num
            budget -= num
        return ALLOWED

    patch.setattr(placement, "_ration", ration)


def checksums_not_compared(patch: pytest.MonkeyPatch) -> None:
    def init(self: Pulls, transport: Any, clock: Any, checksum: Any) -> None:
        original(self, transport, clock, None)

    original = Pulls.__init__
    patch.setattr(Pulls, "__init__", init)


def pull_without_a_timer_once_its_request_has_ended(patch: pytest.MonkeyPatch) -> None:
    def fire(self: DecodeService, due: list[Any], now: float) -> None:
        states = {key: entry.state for key, entry in self._entries.items()}
        original(self, [(kind, key) for kind, key in due if states.get(key) is not DecodeState.DRAINING], now)

    original = DecodeService._fire
    patch.setattr(DecodeService, "_fire", fire)


def refused_early_handoff_told_by_nobody(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: DecodeService, *args: Any, router_knows: bool = True) -> None:
        original(self, *args)

    original = DecodeService._refuse
    patch.setattr(DecodeService, "_refuse", refuse)


def keys_of_a_silent_router_end_in_silence(patch: pytest.MonkeyPatch) -> None:
    def end(self: RouterLink, key: RequestKey, request_number: int, kind: Any, **rest: Any) -> None:
        if rest.get("error") != ROUTER_SILENT:
            original(self, key, request_number, kind, **rest)

    original = RouterLink.end
    patch.setattr(RouterLink, "end", end)


def prefill_judges_how_long_the_answer_may_be(patch: pytest.MonkeyPatch) -> None:
    def add(self: Scheduler, request: Request) -> None:
        original(self, request)
        sequence = self._state.live[request.key]
        sequence.limit = min(sequence.limit, self.config.max_model_len)

    original = Scheduler.add
    patch.setattr(Scheduler, "add", add)


# ---- memory of dead engines


def memory_of_the_dead_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeService, "_on_peer_down", lambda self, envelope: None)


def memory_of_those_who_died_without_a_router_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeService, "forget_peers", lambda self: None)


def peer_that_opens_after_its_death_is_kept(patch: pytest.MonkeyPatch) -> None:
    def retire(self: Pulls, addresses: list[Address]) -> None:
        for address in addresses:
            self._opening.pop(address, None)
        original(self, addresses)

    original = Pulls._retire
    patch.setattr(Pulls, "_retire", retire)


def pull_from_a_peer_given_up_while_it_opened(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: Pulls, address: Address) -> PullFailed:
        self._opening[address].close()
        return PullFailed("opening it takes too long")

    patch.setattr(Pulls, "give_up", give_up)
