"""Bugs in the router. Each function plants one, for test_planted_bugs.py."""

from typing import Any

import pytest

from protocol.errors import RequestCancelled, RequestError
from protocol.messages import Address, Envelope, FinishReason, StepTokens
from router import policy
from router.admission import ClientRequest, Limits
from router.fleet import Fleet
from router.policy import ReplicaView, Route
from router.request import ActiveRequest, Delivered
from router.router import Router


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


def counter_not_decremented_on_reject(patch: pytest.MonkeyPatch) -> None:
    original = Router._failed

    def failed(self: Router, entry: ActiveRequest, error: str) -> None:
        entry.prefill = None
        original(self, entry, error)

    patch.setattr(Router, "_failed", failed)


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


def deadline_not_kept_in_the_routers_queue(patch: pytest.MonkeyPatch) -> None:
    def submit(self: Router, *requests: ClientRequest, door: Address | None = None) -> None:
        original(self, *requests, door=door)
        self._timers.cancel(self._num_numbered - 1)

    original = Router.submit
    patch.setattr(Router, "submit", submit)


def what_can_never_fit_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def check(self: Limits, request: ClientRequest) -> int:
        return min(request.max_tokens or self.max_model_len, max(1, self.max_model_len - len(request.prompt_token_ids)))

    patch.setattr(Limits, "check", check)


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


def drained_engine_gets_more(patch: pytest.MonkeyPatch) -> None:
    def num_places(self: ReplicaView) -> int:
        known = self.state in ("up", "draining") and not self.ending
        return max(0, self.hello.max_num_seqs + policy.DISPATCH_AHEAD - self.in_flight) if known else 0

    patch.setattr(ReplicaView, "num_places", property(num_places))


def order_ends_with_the_engine(patch: pytest.MonkeyPatch) -> None:
    def down(self: Fleet, address: Address) -> None:
        self._drained.discard(address.replica_id)
        original(self, address)

    original = Fleet.down
    patch.setattr(Fleet, "down", down)


def order_ends_with_the_router(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Router, "restore_drained", lambda self, replica_ids: None)
