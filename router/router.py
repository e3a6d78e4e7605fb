"""The life of every request: R's table of the handoff protocol, row by row. The router owns requests and nothing else.

1. `submit` checks a request against what the engines can hold and puts it into the one queue.          QUEUED
2. `_dispatch` asks the policy for a pair of engines, or for one decode engine that serves colocated,
   and sends the request to them.                                                                       ACTIVE
3. `_on_tokens` passes on, once, the tokens that lie beyond those already delivered.                    ACTIVE
4. An attempt fails or is returned, or an engine goes down: the other engine is told, and the next
   attempt gets the prompt and the delivered tokens.                                                    QUEUED
5. `_close` emits exactly one `Ended` per accepted request.                                             CLOSED

The file is long because it is one state table: split, the life of a request would have to be read in two places.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import cast

from protocol.block_hash import chain_hashes, root_hash
from protocol.clock import Clock
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
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
    Envelope,
    FinishReason,
    Hello,
    Message,
    PeerGap,
    PoolName,
    ReplicaStatus,
    RequestKey,
    StepTokens,
    TokenLogprobs,
)
from protocol.timers import Timers
from router.admission import AdmissionQueue, ClientRequest
from router.config import RouterConfig
from router.fleet import Fleet
from router.lockstep import Lockstep
from router.metrics_totals import ReplicaTotals
from router.policy import POLICIES, PlacementRequest, ReplicaView, Route, pick, too_large_for_all
from router.quotas import Quotas
from router.request import ActiveRequest, Delivered, Ended, Usage

log = logging.getLogger(__name__)


class Router:
    """Decides and executes nothing. A shell or the simulator calls `submit`, `cancel`, `stop`, `handle` and `tick`, and
    then empties `outbox` (messages to engines) and `events` (for clients).
    """

    def __init__(self, config: RouterConfig, *, address: Address, clock: Clock, seed: int) -> None:
        self.address = address
        self.outbox: list[tuple[Address, Message]] = []
        self.events: list[Delivered | Ended] = []
        self.lost: list[Address] = []
        """Replicas whose messages have a lasting gap. Their supervisor should end them."""
        self._config = config
        self._clock = clock
        self._random = random.Random(seed)
        self._fleet = Fleet(clock, self.outbox, replica_timeout_s=config.replica_timeout_s)
        self._open: dict[int, ActiveRequest] = {}
        self._request_numbers: dict[str, int] = {}
        self._waiting = AdmissionQueue(config.max_queue)
        self._quotas = Quotas(clock)
        self._timers: Timers[int] = Timers()
        self._held: set[Address] = set()
        self._num_numbered = 0
        self._status_at = clock()
        self._status_seq = 0
        self._draining = False
        self._drain_at: float | None = None
        self.num_cut_short = 0
        """How many requests the drain deadline has ended."""
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("accepted", "retries", "returned", "disaggregated", "colocated", "ignored"),
                *("prompt_tokens", "delivered_tokens", "repeated_tokens"),
            ),
            0,
        )
        """`disaggregated` and `colocated` count attempts as they were dispatched. The front door counts how requests
        end, because it tells their clients.
        """
        self.inter_token = Histogram(SECONDS)
        """Seconds between the arrivals of two tokens of one answer. Tokens that come together are 0 apart."""
        self._gaps: dict[float, int] = {}
        """Gaps of the message in hand that are not in `inter_token` yet: how many answers waited so many seconds. Most
        of them waited equally long, for one step.
        """
        self._logprobs: dict[tuple[int, int, int], TokenLogprobs] = {}
        """Logprobs of the message in hand, by (request_number, attempt, index in the whole answer)."""
        self._locksteps: dict[Address, Lockstep] = {}
        """By decode engine. An entry is dropped when anything but the next tokens happens to one of its requests."""
        self._handlers: dict[type, Callable[[Envelope], None]] = {
            StepTokens: self._on_tokens,
            ReplicaStatus: self._fleet.on_status,
            Hello: self._fleet.on_hello,
            PeerGap: lambda envelope: self.replica_lost(cast(PeerGap, envelope.message).peer),
        }

    # ---- clients

    def submit(self, *requests: ClientRequest, door: Address | None = None) -> None:
        """Accepts all requests, or none and raises a RequestError. Exactly one `Ended` follows each accepted one.
        `door`: where they came in.
        """
        if (refusal := self._refusal()) is not None:
            raise refusal
        max_tokens = [self._check(request) for request in requests]
        if door in self._held:
            raise Overloaded("the door is behind with what it has to deliver", retry_after_s=1.0)
        num_places = self._fleet.num_places(requests, max_tokens, self._config.disaggregation)
        self._waiting.check_room(len(requests), num_places)
        self._quotas.check(requests[0].account, len(requests))
        for request, limit in zip(requests, max_tokens, strict=True):
            self._accept(request, limit, door)
        self._dispatch()

    def hold(self, door: Address) -> None:
        """Takes nothing new from a door, and dispatches none of its queued requests, until `release`. What engines have
        begun goes on.
        """
        self._held.add(door)
        for entry in self._queued(door):
            self._waiting.park(entry.request_number)

    def release(self, door: Address) -> None:
        """Ends a `hold`, if there is one."""
        if door in self._held:
            self._held.remove(door)
            for entry in self._queued(door):
                self._waiting.unpark(entry.request_number)
            self._dispatch()

    def _queued(self, door: Address) -> list[ActiveRequest]:
        return [entry for entry in self._open.values() if entry.key is None and entry.door == door]

    def _refusal(self) -> RequestError | None:
        """Why no request is served at present, or None. `submit` and `ready` both follow this rule."""
        if self._draining:
            return Draining("the deployment is draining")
        if why := self._fleet.why_away("decode"):
            return RequestFailed(why)
        if self._config.disaggregation == "strict" and (why := self._fleet.why_away("prefill")):
            return RequestFailed(f"disaggregation is strict and {why}")
        return None

    def _check(self, request: ClientRequest) -> int:
        """Returns the answer's length limit in tokens. Raises a RequestError if the request cannot be served."""
        if request.request_id in self._request_numbers:
            raise InvalidRequest("request_id", request.request_id, "already in use")
        return self._fleet.check(request, self._config.disaggregation)

    def _accept(self, request: ClientRequest, max_tokens: int, door: Address | None) -> None:
        now = self._clock()
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(63)))
        request_number = self._num_numbered
        self._num_numbered += 1
        self._open[request_number] = ActiveRequest(request, request_number, max_tokens, door, now, now)
        self._request_numbers[request.request_id] = request_number
        self._waiting.push(request_number, request.priority)
        self._quotas.begin(request.account, len(request.prompt_token_ids))
        log.debug("request accepted", extra={"request_id": request.request_id, "max_tokens": max_tokens})
        self.counters["accepted"] += 1
        self.counters["prompt_tokens"] += len(request.prompt_token_ids)
        if request.deadline_s is not None:
            self._timers.set(request_number, now + request.deadline_s)

    def cancel(self, request_id: str) -> None:
        """Ends a request whose client is gone. Unknown and closed requests are ignored."""
        entry = self._find(request_id)
        if entry is not None:
            self._abort_engines(entry, "client")
            self._close(entry, None, RequestCancelled("cancelled by the client"))
            self._dispatch()

    def stop(self, request_id: str) -> None:
        """Ends an answer whose delivered text completes a stop string. Tokens decoded past it are dropped."""
        entry = self._find(request_id)
        if entry is not None:
            self._abort_engines(entry, "superseded")
            self._close(entry, "stop", None)
            self._dispatch()

    # ---- engines

    def handle(self, envelope: Envelope) -> None:
        """Takes one message of an engine; the caller keeps their order. Messages of past epochs are dropped."""
        if envelope.receiver != self.address or not self._fleet.knows(envelope.sender):
            self.counters["ignored"] += 1
            return
        handler = self._handlers.get(type(envelope.message))
        if handler is None:
            raise ProtocolError(f"{type(envelope.message).__name__} is no message for the router")
        handler(envelope)
        self._dispatch()

    def replica_started(self, address: Address) -> None:
        """Takes note of an engine that the supervisor started. It gets a status, and answers with its `Hello`."""
        old = self._fleet.started(address)
        if old is not None:
            self.replica_down(old)
        self._send_status(address)

    def replica_down(self, address: Address) -> None:
        """Takes note that an engine is certainly dead. Its attempts go on elsewhere."""
        self._fleet.down(address)
        self._leave_replica(address, suspected=False)
        self._dispatch()

    def replica_lost(self, address: Address) -> None:
        """Takes note that messages of an engine are missing for good. It may still live, so its attempts are aborted
        there, and the supervisor is told.
        """
        if self._fleet.knows(address):
            log.warning("messages of an engine are missing for good", extra={"peer": label(address)})
            self.lost.append(address)
            self._fleet.suspect(address)
            self._leave_replica(address, suspected=True)
            self.replica_down(address)

    def drain_replica(self, address: Address, deadline_s: float) -> None:
        """Sends nothing new to an engine. Requests that it still has at the deadline come back and go elsewhere."""
        self._fleet.drain(address, deadline_s)

    def set_drained(self, replica_id: str, drained: bool) -> str:
        """Sends nothing new to an engine, and to none that takes its place, until that is taken back. What it has ends
        there in its own time; what it gives back goes elsewhere.

        Returns what that means for new requests; "" if nothing. Requests that wait go on waiting, whatever it is.
        Raises NotFound for an engine that was never heard of.
        """
        self._fleet.set_drained(replica_id, drained)
        self._dispatch()
        if (refusal := self._refusal()) is not None:
            return f"new requests are refused: {refusal}"
        alone = self._config.disaggregation == "auto" and self._fleet.roles.get(replica_id) == "prefill"
        why = self._fleet.why_away("prefill") if alone else ""
        return f"{why}: decode engines compute the prompts that fit there, others are refused" if why else ""

    def restore_drained(self, replica_ids: Iterable[str]) -> None:
        """Takes over the orders that a router before this one had. Called before any engine has said hello."""
        self._fleet.restore_drained(replica_ids)

    def drain(self, deadline_s: float) -> None:
        """Takes no new requests. Those still open in `deadline_s` seconds are ended with an error."""
        self._draining = True
        self._drain_at = self._clock() + deadline_s

    def tick(self) -> None:
        """Handles whatever is due: deadlines, silent engines, the end of a drain, the status, the waiting queue."""
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
        """Whether new requests are taken."""
        return self._refusal() is None

    @property
    def drained(self) -> bool:
        return self._draining and not self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """How many requests wait for engines with room."""
        return len(self._waiting)

    @property
    def oldest_queued_s(self) -> float:
        """How many seconds the request that waits longest has waited; 0 if none waits."""
        return max((self._clock() - entry.since for entry in self._open.values() if entry.key is None), default=0.0)

    def totals(self) -> dict[str, ReplicaTotals]:
        """Returns by replica id what the replica has counted in all its lives."""
        return self._fleet.totals()

    @property
    def max_model_len(self) -> int:
        return self._fleet.limits.max_model_len if self._fleet.limits else 0

    def replicas(self) -> Iterator[ReplicaView]:
        """Iterates over all engines that have said hello and are not down."""
        return iter(self._fleet)

    @property
    def drained_replicas(self) -> frozenset[str]:
        """Replica ids of the engines that an administrator has drained."""
        return self._fleet.drained

    @property
    def roles(self) -> dict[str, PoolName]:
        """The pool of every engine that has ever said hello, by replica id."""
        return self._fleet.roles

    def active(self) -> list[ActiveRequest]:
        """Returns the requests that engines work on."""
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
                    entry.num_cached_tokens = num_cached  # later attempts find their own tokens in the cache
        for end in message.ends:
            entry = self._current(sender, end.request_number, end.attempt)
            if entry is not None:
                self._on_end(entry, sender, end)

    def _on_rows(self, message: StepTokens, sender: Address, now: float) -> None:
        """Takes a message row by row, and begins a lockstep if its rows allow one."""
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
        """Returns the request of a row, or None if another attempt counts by now or `sender` does not work on it."""
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
        """Adds to `delivered` the tokens that lie beyond those already delivered. Both engines may bring the same ones.
        Raises ProtocolError if tokens are missing in between, or if logprobs are missing that the request asked for.
        """
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
        elif end.kind == "invalid":
            grammar = entry.request.sampling.grammar
            self._close(entry, None, InvalidRequest("grammar", grammar.kind if grammar else "none", end.error))
        else:
            self._failed(entry, end.error)

    # ---- attempts

    def _dispatch(self) -> None:
        """Dispatches requests from the head of the queue as long as the policy finds engines for them. A head without
        engines holds up all others, unless only engines that are away could serve it: then it keeps its place and lets
        the others pass.
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
        """Returns what policies know of a request. The hashes cover the prompt alone; they are computed once, and only
        if a policy looks at them.
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
        peers = [label(address) for address in chosen if address]
        log.debug("attempt started", extra=entry.about | {"peers": peers})
        entry.split = chosen.prefill is not None
        message = entry.engine_request(now)
        self.outbox.append((chosen.decode, message))
        entry.decode_load = self._fleet.load_of(chosen.decode, ask)
        self._fleet.load(chosen.decode, entry.decode_load)
        self.counters["colocated" if chosen.prefill is None else "disaggregated"] += 1
        if chosen.prefill is not None:
            self.outbox.append((chosen.prefill, replace(message, role="prefill", peer=chosen.decode)))
            entry.prefill_load = self._fleet.load_of(chosen.prefill, ask)
            self._fleet.load(chosen.prefill, entry.prefill_load)

    def _leave_attempt(self, entry: ActiveRequest) -> None:
        """Takes a request out of ACTIVE and its load off both engines. There is no other way out of ACTIVE."""
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
        if entry.door in self._held:
            self._waiting.park(entry.request_number)

    def _failed(self, entry: ActiveRequest, error: str) -> None:
        """Starts over from the delivered tokens after a failed attempt, or gives up after `max_attempts` failures."""
        peers = [label(address) for address in (entry.prefill, entry.decode) if address]
        log.warning("attempt failed", extra=entry.about | {"peers": peers, "error": error})
        entry.num_failures += 1
        if entry.num_failures >= self._config.max_attempts:
            limit = f"max_attempts is {self._config.max_attempts}"
            self._close(entry, None, RequestFailed(f"{entry.num_failures} attempts failed, {limit}: {error}"))
            return
        self.counters["retries"] += 1
        self._requeue(entry, front=True)

    def _leave_replica(self, address: Address, *, suspected: bool) -> None:
        """Ends every attempt on an engine that is down or suspected. Attempts that decode has taken over go on without
        their prefill engine.
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
        """Closes a request with its one terminal event."""
        stages = entry.close_stages(self._clock())
        self._leave_attempt(entry)
        self._waiting.remove(entry.request_number)
        self._timers.cancel(entry.request_number)
        self._quotas.end(entry.request.account, len(entry.delivered))
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
