"""The life of every request: R's table of the handoff protocol, row by row. The router owns requests and nothing else.

1. `submit`: checked against what the engines can hold, then it waits in one queue      QUEUED
2. `tick`: the policy picks a pair, or a decode engine colocated; both get the request      ACTIVE
3. `StepTokens`: what lies beyond the delivered tokens goes to the client, once         ACTIVE
4. failed, returned, an engine down: the other is told, the next attempt gets
   prompt + delivered tokens                                                            QUEUED
5. exactly one `Ended` per accepted request                                             CLOSED
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from protocol.block_hash import chain_hashes, root_hash
from protocol.clock import Clock
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ProtocolError,
    RequestCancelled,
    RequestError,
    RequestFailed,
)
from protocol.histogram import SECONDS, Histogram
from protocol.log import label
from protocol.messages import (
    AbortReason,
    AbortRequest,
    Address,
    End,
    EngineRequest,
    Envelope,
    FinishReason,
    Hello,
    Message,
    PeerGap,
    ReplicaStatus,
    RequestKey,
    StepTokens,
    TokenLogprobs,
)
from protocol.timers import Timers
from router.admission import AdmissionQueue, ClientRequest, Limits
from router.config import RouterConfig
from router.fleet import Fleet
from router.lockstep import Lockstep
from router.metrics_totals import ReplicaTotals
from router.policy import POLICIES, PlacementRequest, ReplicaView, Route, num_places, pick, too_large_for_all
from router.request import ActiveRequest, Delivered, Ended, Usage

log = logging.getLogger(__name__)


class Router:
    """Decides; executes nothing. A shell or the simulator drives it: submit, cancel, handle, tick, an outbox and client
    events.
    """

    def __init__(self, config: RouterConfig, *, address: Address, clock: Clock, seed: int) -> None:
        self.address = address
        self.outbox: list[tuple[Address, Message]] = []
        self.events: list[Delivered | Ended] = []
        self.lost: list[Address] = []
        """Replicas whose messages have a lasting gap: whoever supervises them should end them."""
        self._config = config
        self._clock = clock
        self._random = random.Random(seed)
        self._fleet = Fleet(clock, self.outbox, replica_timeout_s=config.replica_timeout_s)
        self._open: dict[int, ActiveRequest] = {}
        self._request_numbers: dict[str, int] = {}
        self._waiting = AdmissionQueue(config.max_queue)
        self._timers: Timers[int] = Timers()
        self._num_numbered = 0
        self._status_at = clock()
        self._status_seq = 0
        self._draining = False
        self._drain_at: float | None = None
        self.num_cut_short = 0
        """Requests that the drain deadline has ended."""
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("accepted", "retries", "returned", "disaggregated", "colocated", "ignored"),
                *("prompt_tokens", "delivered_tokens", "repeated_tokens"),
            ),
            0,
        )
        """`disaggregated`, `colocated`: attempts as dispatched. How requests end is counted where their clients are
        told, in the front door.
        """
        self.inter_token = Histogram(SECONDS)
        """Seconds between the arrivals of two tokens of one answer; tokens that come together are 0 apart."""
        self._gaps: dict[float, int] = {}
        """Of the message in hand, not yet in `inter_token`: seconds, and how many answers waited so long. Most waited
        for one step.
        """
        self._logprobs: dict[tuple[int, int, int], TokenLogprobs] = {}
        """Of the message in hand, by (request_number, attempt, index in the whole answer)."""
        self._locksteps: dict[Address, Lockstep] = {}
        """By decode engine; dropped when anything but the engine's next tokens befalls one of the requests."""
        self._handlers: dict[type, Callable[[Envelope], None]] = {
            StepTokens: self._on_tokens,
            ReplicaStatus: self._fleet.on_status,
            Hello: self._fleet.on_hello,
            PeerGap: lambda envelope: self.replica_lost(cast(PeerGap, envelope.message).peer),
        }

    # ---- clients

    def submit(self, *requests: ClientRequest) -> None:
        """Accepts all of them, or none and raises a RequestError. For each one that is accepted exactly one `Ended`
        follows.
        """
        if (refusal := self._refusal()) is not None:
            raise refusal
        max_tokens = [self._check(request) for request in requests]
        self._waiting.check_room(len(requests), self._num_places(requests, max_tokens))
        for request, limit in zip(requests, max_tokens, strict=True):
            self._accept(request, limit)
        self._dispatch()

    def _refusal(self) -> RequestError | None:
        """Why nobody is served at present, if so. The one rule for `submit` and for `ready`."""
        if self._draining:
            return Draining("the deployment is draining")
        if not self._fleet.has_up("decode"):
            return RequestFailed("no decode engine is up")
        if self._config.disaggregation == "strict" and not self._fleet.has_up("prefill"):
            return RequestFailed("disaggregation is strict and no prefill engine is up")
        return None

    def _check(self, request: ClientRequest) -> int:
        """Returns the answer's length limit in tokens; raises a RequestError for what can never be served."""
        if request.request_id in self._request_numbers:
            raise InvalidRequest("request_id", request.request_id, "already in use")
        limits = self._fleet.limits
        assert limits is not None, "a decode engine is up"
        max_tokens = limits.check(request)
        self._check_prompt(limits, len(request.prompt_token_ids), max_tokens)
        return max_tokens

    def _num_places(self, requests: Sequence[ClientRequest], max_tokens: Sequence[int]) -> int:
        """How many of them could be dispatched at once, if all were like the longest."""
        num_tokens = max(len(request.prompt_token_ids) for request in requests)
        ask = PlacementRequest(num_tokens, 0, max(max_tokens), (), self._clock())
        prefill, decode = self._fleet.pool("prefill"), self._fleet.pool("decode")
        return num_places(prefill, decode, ask, disaggregation=self._config.disaggregation)

    def _accept(self, request: ClientRequest, max_tokens: int) -> None:
        now = self._clock()
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(63)))
        request_number = self._num_numbered
        self._num_numbered += 1
        self._open[request_number] = ActiveRequest(request, request_number, max_tokens, now, now)
        self._request_numbers[request.request_id] = request_number
        self._waiting.push(request_number, request.priority)
        log.debug("request accepted", extra={"request_id": request.request_id, "max_tokens": max_tokens})
        self.counters["accepted"] += 1
        self.counters["prompt_tokens"] += len(request.prompt_token_ids)
        if request.deadline_s is not None:
            self._timers.set(request_number, now + request.deadline_s)

    def _check_prompt(self, limits: Limits, num_prompt: int, max_tokens: int) -> None:
        """Refuses a prompt that nobody can compute: for good where no engine ever seen can, for now while those that
        can are away.

        In strict there is no silent fallback: a prefill engine that is up must hold even the last retry of a request.
        """
        mode = self._config.disaggregation
        colocated = 0 if mode == "strict" else limits.max_prompt_tokens
        if num_prompt <= colocated:
            return
        up = [r for r in self._fleet.pool("prefill") if r.state == "up"]
        longest = colocated if mode == "colocated" else max(colocated, self._fleet.max_prefill_tokens)
        if num_prompt > longest:
            raise InvalidRequest(
                "prompt", f"{num_prompt} tokens", f"the longest prompt that an engine computes has {longest} tokens"
            )
        able = [r for r in up if num_prompt <= r.hello.max_prompt_tokens]
        if not able:
            raise RequestFailed(f"no prefill engine that computes a prompt of {num_prompt} tokens is up")
        num_tokens, room = num_prompt + max_tokens - 1, max(r.max_known_tokens for r in able)
        if mode == "strict" and num_tokens > room:
            raise InvalidRequest(
                "prompt", f"{num_tokens} tokens with its answer", f"prefill engines hold {room} tokens"
            )

    def cancel(self, request_id: str) -> None:
        """The client is gone. Unknown or closed requests are fine."""
        entry = self._find(request_id)
        if entry is not None:
            self._abort_engines(entry, "client")
            self._close(entry, None, RequestCancelled("cancelled by the client"))
            self._dispatch()

    def stop(self, request_id: str) -> None:
        """A stop string is complete in the delivered text: the answer ends here, tokens decoded past it are waste."""
        entry = self._find(request_id)
        if entry is not None:
            self._abort_engines(entry, "superseded")
            self._close(entry, "stop", None)
            self._dispatch()

    # ---- engines

    def handle(self, envelope: Envelope) -> None:
        """One message of an engine, in its order. What comes from an epoch that is not the replica's present one is
        dropped.
        """
        if envelope.receiver != self.address or not self._fleet.knows(envelope.sender):
            self.counters["ignored"] += 1
            return
        handler = self._handlers.get(type(envelope.message))
        if handler is None:
            raise ProtocolError(f"{type(envelope.message).__name__} is no message for the router")
        handler(envelope)
        self._dispatch()

    def replica_started(self, address: Address) -> None:
        """The supervisor started an engine. It answers our status with its `Hello`."""
        old = self._fleet.started(address)
        if old is not None:
            self.replica_down(old)
        self._send_status(address)

    def replica_down(self, address: Address) -> None:
        """An engine is dead for certain: its attempts go on elsewhere."""
        self._fleet.down(address)
        self._leave_replica(address, suspected=False)
        self._dispatch()

    def replica_lost(self, address: Address) -> None:
        """Messages from an engine are missing for good. It may still live: its attempts are aborted there, and the
        supervisor is told.
        """
        if self._fleet.knows(address):
            log.warning("messages of an engine are missing for good", extra={"peer": label(address)})
            self.lost.append(address)
            self._fleet.suspect(address)
            self._leave_replica(address, suspected=True)
            self.replica_down(address)

    def drain_replica(self, address: Address, deadline_s: float) -> None:
        """Sends nothing new there; what it has by the deadline comes back and goes elsewhere."""
        self._fleet.drain(address, deadline_s)

    def drain(self, deadline_s: float) -> None:
        """Takes nothing new; what is open by the deadline is ended with an error."""
        self._draining = True
        self._drain_at = self._clock() + deadline_s

    def tick(self) -> None:
        """Deadlines, silent engines, the drain deadline, the status, the waiting queue."""
        now = self._clock()
        for request_number in self._timers.due(now):
            entry = self._open[request_number]
            self._abort_engines(entry, "deadline")
            self._close(entry, None, DeadlineExceeded(f"deadline: {entry.request.deadline_s} s have passed"))
        if self._config.queue_ttl_s is not None:
            self._expire_queued(now - self._config.queue_ttl_s)
        for address in self._fleet.newly_silent():
            self._leave_replica(address, suspected=True)
        if self._drain_at is not None and now >= self._drain_at:
            for entry in list(self._open.values()):
                self.num_cut_short += 1
                self._abort_engines(entry, "superseded")
                self._close(entry, None, Draining("the deployment was shut down"))
        if now >= self._status_at:
            self._status_at = now + self._config.status_interval_s
            self._send_status()
        self._dispatch()

    # ---- what shells may ask

    @property
    def ready(self) -> bool:
        """New requests are taken."""
        return self._refusal() is None

    @property
    def drained(self) -> bool:
        return self._draining and not self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Requests that wait here for engines with room."""
        return len(self._waiting)

    @property
    def oldest_queued_s(self) -> float:
        """How long the one that waits longest has waited; 0 when none waits."""
        return max((self._clock() - entry.since for entry in self._open.values() if entry.key is None), default=0.0)

    def totals(self) -> dict[str, ReplicaTotals]:
        """By replica id, what it has counted in all its lives."""
        return self._fleet.totals()

    @property
    def max_model_len(self) -> int:
        return self._fleet.limits.max_model_len if self._fleet.limits else 0

    def replicas(self) -> Iterator[ReplicaView]:
        """Every engine that has said hello and is not down."""
        return iter(self._fleet)

    def active(self) -> list[ActiveRequest]:
        """Requests that engines work on."""
        return [entry for entry in self._open.values() if entry.key is not None]

    # ---- messages of engines

    def _on_tokens(self, envelope: Envelope) -> None:
        message, sender = cast(StepTokens, envelope.message), envelope.sender
        if message.router_epoch != self.address.epoch:
            self.counters["ignored"] += 1
            return
        if len(message.request_numbers):
            now, lockstep = self._clock(), self._locksteps.get(sender)
            if lockstep is not None and lockstep.goes_on(message):
                self.inter_token.observe(now - lockstep.at, len(message.request_numbers))
                self.counters["delivered_tokens"] += len(message.request_numbers)
                self.events.append(lockstep.advance(message, now))
            else:
                self._on_rows(message, sender, now)
        for request_number, attempt, seconds, num_cached in message.stages:
            entry = self._current(sender, request_number, attempt)
            if entry is not None:
                entry.attempt_stages.update(seconds)
                if entry.num_cached_tokens is None and not entry.first_offset:
                    entry.num_cached_tokens = num_cached  # of an attempt with delivered tokens it would be its own work
        for end in message.ends:
            entry = self._current(sender, end.request_number, end.attempt)
            if entry is not None:
                self._on_end(entry, sender, end)

    def _on_rows(self, message: StepTokens, sender: Address, now: float) -> None:
        """Each row for itself."""
        self._locksteps.pop(sender, None)
        start, token_ids, entries = 0, message.token_ids.tolist(), []
        delivered = Delivered([], [], [], {})
        self._logprobs = {
            (request_number, attempt, offset): values for request_number, attempt, offset, values in message.logprobs
        }
        rows = zip(
            message.request_numbers.tolist(),
            message.attempts.tolist(),
            message.offsets.tolist(),
            message.counts.tolist(),
            strict=True,
        )
        for request_number, attempt, offset, count in rows:
            entry = self._current(sender, request_number, attempt)
            if entry is not None:
                self._deliver(entry, sender, offset, token_ids[start : start + count], now, delivered)
                entries.append(entry)
            start += count
        if delivered.request_ids:
            self.events.append(delivered)
        for seconds, times in self._gaps.items():
            self.inter_token.observe(seconds, times)
        self._gaps.clear()
        self.counters["delivered_tokens"] += len(delivered.token_ids)
        if (lockstep := Lockstep.begin(message, sender, entries, now)) is not None:
            self._locksteps[sender] = lockstep

    def _current(self, sender: Address, request_number: int, attempt: int) -> ActiveRequest | None:
        """The request a row is about, if that attempt is still the one that counts and `sender` works on it."""
        entry = self._open.get(request_number)
        if (
            entry is None
            or entry.key is None
            or entry.attempt != attempt
            or sender not in (entry.decode, entry.prefill)
        ):
            self.counters["ignored"] += 1
            return None
        return entry

    def _deliver(
        self, entry: ActiveRequest, sender: Address, offset: int, token_ids: list[int], now: float, delivered: Delivered
    ) -> None:
        """Adds to `delivered` what lies beyond the delivered tokens; both engines may bring the same ones."""
        num_delivered = len(entry.delivered)
        if offset > num_delivered:
            raise ProtocolError(f"{entry.key}: tokens start at {offset}, only {num_delivered} were delivered")
        if sender != entry.decode:
            self._forget_lockstep(entry)
        elif not entry.decode_seen:
            entry.decode_seen = True
            if entry.prefill is not None:
                self._fleet.unload(entry.prefill, entry.prefill_load)
        new = token_ids
        if offset < num_delivered:
            new = token_ids[num_delivered - offset :]
            self.counters["repeated_tokens"] += len(token_ids) - len(new)
        if len(new):
            if num_delivered:
                seconds = now - entry.delivered_at
                self._gaps[seconds] = self._gaps.get(seconds, 0) + 1
            if len(new) > 1:
                self.inter_token.observe(0.0, len(new) - 1)
            entry.delivered_at = now
            entry.delivered += new
            delivered.request_ids.append(entry.request.request_id)
            delivered.token_ids.extend(new)
            delivered.counts.append(len(new))
            if entry.request.sampling.logprobs is not None:
                indices = range(num_delivered, num_delivered + len(new))
                logprobs = tuple(
                    values
                    for index in indices
                    if (values := self._logprobs.get((entry.request_number, entry.attempt, index)))
                )
                if len(logprobs) < len(new):
                    raise ProtocolError(f"{entry.key}: logprobs of {len(logprobs)} tokens came with {len(new)} tokens")
                delivered.logprobs[entry.request.request_id] = logprobs

    def _forget_lockstep(self, entry: ActiveRequest) -> None:
        if entry.decode is not None:
            self._locksteps.pop(entry.decode, None)

    def _on_end(self, entry: ActiveRequest, sender: Address, end: End) -> None:
        other = entry.prefill if sender == entry.decode else entry.decode
        if end.kind != "finished" or sender == entry.prefill:
            self._abort(entry, other, "superseded")
        if end.kind == "finished":
            self._close(entry, end.finish_reason, None)
        elif end.kind == "aborted":
            self._close(entry, None, DeadlineExceeded(f"deadline: {entry.request.deadline_s} s have passed"))
        elif end.kind == "returned":
            log.debug("attempt returned", extra=entry.about | {"peer": label(sender), "error": end.error})
            self.counters["returned"] += 1
            self._requeue(entry, front=True)
        else:
            self._failed(entry, end.error)

    # ---- attempts

    def _dispatch(self) -> None:
        """Gives engines to the head of the line as long as the policy finds some. The head that finds none stops the
        line.

        Not so one that only engines which are away could serve: it keeps its place and lets the others pass.
        """
        if not len(self._waiting):
            return
        set_aside: list[ActiveRequest] = []
        prefill, decode, mode = self._fleet.pool("prefill"), self._fleet.pool("decode"), self._config.disaggregation
        while (request_number := self._waiting.head()) is not None:
            entry = self._open[request_number]
            ask = self._ask(entry)
            chosen = pick(
                POLICIES[self._config.policy].choose,
                prefill,
                decode,
                ask,
                disaggregation=mode,
                min_disaggregated_tokens=self._config.min_disaggregated_tokens,
            )
            if chosen is None and not too_large_for_all(prefill, decode, ask, disaggregation=mode):
                break
            self._waiting.remove(request_number)
            if chosen is None:
                set_aside.append(entry)
            else:
                self._start_attempt(entry, chosen, ask)
        for entry in reversed(set_aside):
            self._waiting.push(entry.request_number, entry.request.priority, front=True)

    def _ask(self, entry: ActiveRequest) -> PlacementRequest:
        """What the policies know of a request; its hashes, of the prompt alone, are computed once, and only if a policy
        looks at them.
        """
        if entry.hashes is None and (
            POLICIES[self._config.policy].wants_hashes or self._config.min_disaggregated_tokens
        ):
            hello = next((replica.hello for replica in self._fleet), None)
            if hello is not None:
                root = root_hash(hello.layout_fingerprint, entry.request.cache_salt)
                entry.hashes = chain_hashes(root, entry.request.prompt_token_ids, hello.block_size)
        num_delivered = len(entry.delivered)
        num_tokens = len(entry.request.prompt_token_ids) + num_delivered
        return PlacementRequest(
            num_tokens, num_delivered, entry.max_tokens - num_delivered, entry.hashes or (), self._clock()
        )

    def _start_attempt(self, entry: ActiveRequest, chosen: Route, ask: PlacementRequest) -> None:
        now = self._clock()
        entry.spent("router_queue", now)
        entry.attempt += 1
        entry.key = RequestKey(self.address.epoch, entry.request.request_id, entry.attempt)
        entry.prefill, entry.decode, entry.decode_seen = chosen.prefill, chosen.decode, False
        entry.first_offset = len(entry.delivered)
        log.debug(
            "attempt started", extra=entry.about | {"peers": [label(a) for a in (chosen.prefill, chosen.decode) if a]}
        )
        entry.split = chosen.prefill is not None
        request = entry.request
        prompt = request.prompt_token_ids
        if entry.delivered:
            prompt = np.concatenate([prompt, np.asarray(entry.delivered, dtype=np.int32)])
        message = EngineRequest(
            key=entry.key,
            request_number=entry.request_number,
            role="colocated" if chosen.prefill is None else "decode",
            peer=chosen.prefill,
            prompt_token_ids=prompt,
            offset=len(entry.delivered),
            max_tokens=entry.max_tokens - len(entry.delivered),
            sampling=request.sampling,
            priority=request.priority,
            deadline_s=None if request.deadline_s is None else max(0.0, entry.accepted_at + request.deadline_s - now),
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
        )
        self.outbox.append((chosen.decode, message))
        entry.decode_load = self._fleet.load_of(chosen.decode, ask)
        self._fleet.load(chosen.decode, entry.decode_load)
        self.counters["colocated" if chosen.prefill is None else "disaggregated"] += 1
        if chosen.prefill is not None:
            self.outbox.append((chosen.prefill, replace(message, role="prefill", peer=chosen.decode)))
            entry.prefill_load = self._fleet.load_of(chosen.prefill, ask)
            self._fleet.load(chosen.prefill, entry.prefill_load)

    def _leave_attempt(self, entry: ActiveRequest) -> None:
        """The one way out of ACTIVE: both in-flight counters go down, what the attempt spent is booked."""
        if entry.key is None:
            return
        self._forget_lockstep(entry)
        if entry.decode is not None:
            self._fleet.unload(entry.decode, entry.decode_load)
        if entry.prefill is not None and not entry.decode_seen:
            self._fleet.unload(entry.prefill, entry.prefill_load)
        entry.key = entry.prefill = entry.decode = None

    def _requeue(self, entry: ActiveRequest, *, front: bool) -> None:
        entry.spent("lost_attempts", self._clock())
        entry.attempt_stages.clear()
        self._leave_attempt(entry)
        self._waiting.push(entry.request_number, entry.request.priority, front=front)

    def _failed(self, entry: ActiveRequest, error: str) -> None:
        """One attempt failed: try again from what was delivered, or give up."""
        peers = [label(address) for address in (entry.prefill, entry.decode) if address]
        log.warning("attempt failed", extra=entry.about | {"peers": peers, "error": error})
        entry.num_failures += 1
        if entry.num_failures >= self._config.max_attempts:
            self._close(
                entry,
                None,
                RequestFailed(
                    f"{entry.num_failures} attempts failed, max_attempts is {self._config.max_attempts}: {error}"
                ),
            )
            return
        self.counters["retries"] += 1
        self._requeue(entry, front=True)

    def _leave_replica(self, address: Address, *, suspected: bool) -> None:
        """An engine is down or suspected: every attempt on it ends here, or goes on without it where decode has taken
        over.
        """
        for entry in list(self._open.values()):
            if entry.key is None:
                continue
            if entry.prefill == address and entry.decode_seen:
                if suspected:
                    self._abort(entry, address, "superseded")
                entry.prefill = None
            elif entry.prefill == address:
                self._abort(entry, entry.decode, "superseded")
                if suspected:
                    self._abort(entry, address, "superseded")
                self._failed(entry, f"prefill replica {address.replica_id} is down")
            elif entry.decode == address:
                self._abort(entry, entry.prefill, "peer_lost")
                if suspected:
                    self._abort(entry, address, "superseded")
                self._failed(entry, f"decode replica {address.replica_id} is down")

    def _abort(self, entry: ActiveRequest, address: Address | None, reason: AbortReason) -> None:
        if address is not None and entry.key is not None:
            self.outbox.append((address, AbortRequest(key=entry.key, reason=reason)))

    def _abort_engines(self, entry: ActiveRequest, reason: AbortReason) -> None:
        self._abort(entry, entry.prefill, reason)
        self._abort(entry, entry.decode, reason)

    def _close(self, entry: ActiveRequest, finish_reason: FinishReason | None, error: RequestError | None) -> None:
        """The one terminal event."""
        stages = entry.close_stages(self._clock())
        self._leave_attempt(entry)
        self._waiting.remove(entry.request_number)
        self._timers.cancel(entry.request_number)
        del self._open[entry.request_number]
        del self._request_numbers[entry.request.request_id]
        num_cached = 0 if entry.num_cached_tokens is None else entry.num_cached_tokens
        usage = Usage(len(entry.request.prompt_token_ids), num_cached, len(entry.delivered))
        self.events.append(
            Ended(entry.request.request_id, finish_reason, error, usage, stages, entry.attempt, entry.path)
        )
        fields = {
            "finish_reason": finish_reason,
            "error": error and str(error),
            "usage": usage._asdict(),
            "stages": stages,
        }
        log.debug("request ended", extra=entry.about | fields)

    def _expire_queued(self, before: float) -> None:
        for entry in [e for e in self._open.values() if e.key is None and e.attempt == 0 and e.accepted_at <= before]:
            self._close(entry, None, DeadlineExceeded(f"waited longer than queue_ttl_s = {self._config.queue_ttl_s}"))

    def _find(self, request_id: str) -> ActiveRequest | None:
        request_number = self._request_numbers.get(request_id)
        return None if request_number is None else self._open[request_number]

    def _send_status(self, to: Address | None = None) -> None:
        self._status_seq += 1
        self._fleet.send_status(
            self.address.epoch, self._status_seq, to, returns=self._config.disaggregation != "colocated"
        )
