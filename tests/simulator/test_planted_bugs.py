"""A check that cannot fail checks nothing: each planted bug must be caught by the simulator within 200 seeds."""

from collections.abc import Callable
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
from protocol.errors import PullFailed, RequestCancelled, RequestError
from protocol.messages import Address, EndKind, Envelope, FinishReason, KVRelease, KVRenew, RequestKey, StepTokens
from protocol.router_link import ROUTER_SILENT, RouterLink
from router import policy
from router.admission import ClientRequest, Limits
from router.policy import Route
from router.request import ActiveRequest, Delivered
from router.router import Router
from simulator.seeds import run_seeds
from simulator.violation import Violation

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
    def deliver(
        self: Router,
        entry: ActiveRequest,
        sender: Address,
        offset: int,
        token_ids: list[int],
        now: float,
        delivered: Delivered,
    ) -> None:
        original(self, entry, sender, offset, token_ids[:0], now, delivered)
        entry.delivered.extend(token_ids)
        delivered.request_ids.append(entry.request.request_id)
        delivered.token_ids.extend(token_ids)
        delivered.counts.append(len(token_ids))

    original = Router._deliver
    patch.setattr(Router, "_deliver", deliver)


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


def counter_not_decremented_on_reject(patch: pytest.MonkeyPatch) -> None:
    original = Router._failed

    def failed(self: Router, entry: ActiveRequest, error: str) -> None:
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

    def close(
        self: Router, entry: ActiveRequest, finish_reason: FinishReason | None, error: RequestError | None
    ) -> None:
        key = entry.key
        original(self, entry, finish_reason, error)
        if isinstance(error, RequestCancelled) and key is not None:
            entry.key, entry.prefill, entry.decode = None, None, None
            self._open[entry.request_number] = entry
            self._request_numbers[entry.request.request_id] = entry.request_number
            self._waiting.push(entry.request_number, 0)

    patch.setattr(Router, "_close", close)


# ---- I4


def deadline_not_kept_in_the_routers_queue(patch: pytest.MonkeyPatch) -> None:
    def submit(self: Router, request: ClientRequest) -> None:
        original(self, request)
        self._timers.cancel(self._num_numbered - 1)

    original = Router.submit
    patch.setattr(Router, "submit", submit)


# ---- I6


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


# ---- I9


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


def what_can_never_fit_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def check(self: Limits, request: ClientRequest) -> int:
        return min(request.max_tokens or self.max_model_len, max(1, self.max_model_len - len(request.prompt_token_ids)))

    patch.setattr(Limits, "check", check)


# ---- I10


def retry_counted_as_accepted(patch: pytest.MonkeyPatch) -> None:
    def requeue(self: Router, entry: ActiveRequest, *, front: bool) -> None:
        self.counters["accepted"] += 1
        original(self, entry, front=front)

    original = Router._requeue
    patch.setattr(Router, "_requeue", requeue)


def seconds_booked_twice(patch: pytest.MonkeyPatch) -> None:
    def spent(self: ActiveRequest, stage: str, now: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self.since

    patch.setattr(ActiveRequest, "spent", spent)


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


# ---- I12


def strict_falls_back(patch: pytest.MonkeyPatch) -> None:
    def pick(*args: Any, disaggregation: str, min_disaggregated_tokens: int) -> Route | None:
        mode: Any = "auto" if disaggregation == "strict" else disaggregation
        return policy.pick(*args, disaggregation=mode, min_disaggregated_tokens=min_disaggregated_tokens)

    patch.setattr("router.router.pick", pick)


def everything_counts_as_disaggregated(patch: pytest.MonkeyPatch) -> None:
    def close(
        self: Router, entry: ActiveRequest, finish_reason: FinishReason | None, error: RequestError | None
    ) -> None:
        entry.split = True
        original(self, entry, finish_reason, error)

    original = Router._close
    patch.setattr(Router, "_close", close)


# ---- I14


def drafts_before_the_next_answers_token(patch: pytest.MonkeyPatch) -> None:
    def ration(state: SchedulerState, budget: int, threshold: int) -> int:
        table = state.table
        for position in range(len(table)):
            num = min(int(table.goal[position] - table.computed[position]), threshold, budget)
            table.allowed[position] = table.computed[position] + num
            budget -= num
        return ALLOWED

    patch.setattr(placement, "_ration", ration)


# ---- checksums


def checksums_not_compared(patch: pytest.MonkeyPatch) -> None:
    def init(self: Pulls, transport: Any, clock: Any, checksum: Any) -> None:
        original(self, transport, clock, None)

    original = Pulls.__init__
    patch.setattr(Pulls, "__init__", init)


# ---- who frees what a request leaves behind, and who tells of it


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


# ---- promises and figures


def prefill_judges_how_long_the_answer_may_be(patch: pytest.MonkeyPatch) -> None:
    def add(self: Scheduler, request: Request) -> None:
        original(self, request)
        sequence = self._state.live[request.key]
        sequence.limit = min(sequence.limit, self.config.max_model_len)

    original = Scheduler.add
    patch.setattr(Scheduler, "add", add)


def no_hit_taken_for_not_told(patch: pytest.MonkeyPatch) -> None:
    def handle(self: Router, envelope: Envelope) -> None:
        if isinstance(envelope.message, StepTokens):
            for request_number, attempt, _, num_cached in envelope.message.stages:
                entry = self._open.get(request_number)
                if entry is not None and entry.attempt == attempt:
                    entry.num_cached_tokens = entry.num_cached_tokens or num_cached
        original(self, envelope)

    original = Router.handle
    patch.setattr(Router, "handle", handle)


def memory_of_the_dead_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeService, "_on_peer_down", lambda self, envelope: None)


def memory_of_those_who_died_without_a_router_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeService, "forget_peers", lambda self: None)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (free_at_abort_while_a_pull_runs, ":"),
        (release_ignored, ":"),
        (router_does_not_deduplicate, "I13"),
        (lease_word_not_read, ":"),
        (hashes_visible_before_verification, "I8"),
        (release_sent_twice, "I6"),
        (lease_not_renewed, ":"),
        (offer_to_a_replica_that_was_replaced, ":"),
        (counter_not_decremented_on_reject, "I5"),
        (deadline_only_checked_when_busy, ":"),
        (retry_after_the_terminal_event, "I13"),
        (deadline_not_kept_in_the_routers_queue, "I4"),
        (lease_ended_without_an_answer, "I6"),
        (refused_after_it_was_consumed, "I6"),
        (arrived_ones_wait_behind_the_line, "I9"),
        (arrived_ones_get_what_prompts_and_drafts_leave, "I9"),
        (destination_without_the_next_tokens_slot, "I9"),
        (what_can_never_fit_is_accepted, "I9"),
        (retry_counted_as_accepted, "I10"),
        (seconds_booked_twice, "I10"),
        (failed_steps_counted, "I10"),
        (strict_falls_back, "I12"),
        (everything_counts_as_disaggregated, "I12"),
        (drafts_before_the_next_answers_token, "I14"),
        (checksums_not_compared, ":"),
        (pull_without_a_timer_once_its_request_has_ended, "not quiet"),
        (refused_early_handoff_told_by_nobody, "told by nobody"),
        (keys_of_a_silent_router_end_in_silence, "told by nobody|not quiet"),
        (prefill_judges_how_long_the_answer_may_be, "I7"),
        (no_hit_taken_for_not_told, "were cached"),
        (memory_of_the_dead_is_kept, "successors"),
        (memory_of_those_who_died_without_a_router_is_kept, "successors"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bug_is_caught(plant: Patch, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`found`: the invariant that has to say so; ":": whichever comes first."""
    plant(monkeypatch)
    with pytest.raises(Violation, match=found) as caught:
        run_seeds(1, 200)
    print(f"\n{plant.__name__}: {caught.value}")
