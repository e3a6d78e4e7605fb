"""A prefill engine's life of a request: P's table of the handoff protocol, row by row (states in kv_transfer/state.py).

 1. `EngineRequest`: joins the scheduler's queue                                        WAITING
 2. admitted: all prompt blocks are taken at once, chunks are computed                  RUNNING
 3. after each chunk: the lease word is written, the ready blocks are offered           RUNNING
 4. last chunk: first token to the router, final offer to decode, lease timer starts    LEASED
 5. `KVRelease(consumed)`: word cleared, blocks freed                                   gone
 6. whatever else ends an offered request: `KVRevoke`, then decode's answer or a fence  REVOKING, gone

Safety is one order, kept in `_free`: clear the word, pass a barrier, then free.

The file has more than 300 lines because it is one state table, which is read row by row.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args

from engine.parts import EngineParts
from engine.runner import Batch, StepOutput
from engine.scheduler.scheduler import PromptDone
from engine.scheduler.sequence import Request
from engine.scheduler.step_counts import PREFIX_COUNTERS, StepCounts
from kv_transfer.checksum import checksum_of
from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.lease import LeaseTable
from kv_transfer.state import PREFILL_TABLE, PREFILL_TIMERS, PrefillEvent, PrefillState, PrefillTimer, advance
from protocol.errors import InvalidRequest, ProtocolError
from protocol.log import about, label
from protocol.messages import (
    AbortRequest,
    Address,
    EndKind,
    EngineRequest,
    Envelope,
    KVHandoff,
    KVRelease,
    KVRenew,
    KVRevoke,
    Message,
    ReplicaStatus,
    RequestKey,
    RouterStatus,
    TokenLogprobs,
)
from protocol.router_link import ROUTER_SILENT, Ending, RouterLink
from protocol.timeline import Timeline
from protocol.timers import Timers

log = logging.getLogger(__name__)

_TIMERS: frozenset[PrefillTimer] = frozenset(get_args(PrefillTimer))


@dataclass(slots=True)
class Prefill:
    """One attempt on this engine. The scheduler owns its blocks until the last commit or the revoke, this entry
    (`block_ids`) afterwards.
    """

    request: EngineRequest
    timeline: Timeline
    state: PrefillState = PrefillState.GONE
    block_ids: list[int] | None = None
    lease_id: int = 0
    """It is 0 until the first handoff is sent."""
    lease_index: int = -1
    num_offered_tokens: int = 0
    checksums: tuple[int, ...] = ()
    """Checksums of the offered blocks, where blocks are checked."""
    final_sent: bool = False
    report: EndKind | None = None
    """What the router is told when REVOKING is over; None if nothing."""
    num_cached_tokens: int = 0

    @property
    def peer(self) -> Address:
        if self.request.peer is None:
            raise ProtocolError(f"{self.request.key}: a prefill request names no decode peer")
        return self.request.peer


class Lease(NamedTuple):
    word_index: int
    lease_id: int
    block_ids: list[int]


class PrefillService:
    """Decides; it executes nothing. A shell or the simulator calls `handle`, `tick`, `schedule` and `commit`, and sends
    what is in the outbox.
    """

    def __init__(self, engine: EngineParts, *, leases: LeaseTable, config: TransferConfig, cache: KVCache) -> None:
        """Blocks of `cache` are offered; their bytes are read here only for checksums."""
        self.address = engine.address
        self.outbox: list[tuple[Address, Message]] = []
        self._scheduler = engine.scheduler
        self._grammars = engine.grammars
        self._leases = leases
        self._checksum = checksum_of(cache.tensor) if config.checksum else None
        self._config = config
        self._hello = engine.hello
        self._clock = engine.clock
        self._entries: dict[RequestKey, Prefill] = {}
        self.timers: Timers[tuple[PrefillTimer, RequestKey]] = Timers()
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("requests", "prompt_tokens", *PREFIX_COUNTERS, "generated_tokens"),
                *("handoffs", "consumed", "refused", "expired", "timers_fired", "ignored"),
                *StepCounts.KEYS,
            ),
            0,
        )
        self._steps = StepCounts(self.counters, engine.scheduler.config)
        handlers: dict[type, Callable[[Envelope], None]] = {
            EngineRequest: self._on_generate,
            AbortRequest: self._on_abort,
            KVRelease: self._on_release,
            KVRenew: self._on_renew,
            RouterStatus: lambda envelope: None,
        }
        self._link = RouterLink(
            self,
            engine.link,
            engine.clock,
            address=engine.address,
            hello=engine.hello,
            handlers=handlers,
            outbox=self.outbox,
            counters=self.counters,
        )

    # ---- the four verbs of a service

    def handle(self, envelope: Envelope) -> None:
        """Takes one message, in its sender's order. Messages of stale epochs are dropped."""
        self._link.handle(envelope)

    def tick(self) -> None:
        """Looks at timers, grammars that are compiled, the router's silence and the drain deadline, and sends the
        status when it is due.
        """
        now = self._clock()
        for key, fault in self._grammars.ended():
            self._join(self._entries[key], fault)
        for kind, key in self.timers.due(now):
            entry = self._entries.get(key)
            if entry is None or kind not in PREFILL_TIMERS[entry.state]:
                continue  # ended by a timer that was due in the same tick
            self.counters["timers_fired"] += 1
            if kind == "lease":
                self._on_lease_timer(entry)
            elif kind == "revoke":
                self._on_revoke_timer(entry)
            else:
                self._on_deadline(entry)
        self._link.tick()

    def schedule(self) -> Batch | None:
        started_at = self._clock()
        batch = self._scheduler.schedule()
        events = self._scheduler.take_events()
        self.counters["scheduler_seconds"] += self._clock() - started_at
        for key, num_cached in events.admitted:
            entry = self._entries[key]
            self._move(entry, PrefillEvent.ADMITTED, PrefillState.RUNNING)
            entry.num_cached_tokens = num_cached
            entry.timeline.enter("prefill")
            self._steps.looked_up(key, num_cached, len(entry.request.prompt_token_ids))
        if batch is not None:
            self._steps.scheduled(batch)
        return batch

    def commit(self, output: StepOutput) -> None:
        """A step was executed: offers what has become ready, hands over what is complete."""
        started_at = self._clock()
        for key, error in self._scheduler.failures(output):
            self._fail(self._entries[key], "invalid", error)
        committed = self._scheduler.commit(output)
        self.counters["scheduler_seconds"] += self._clock() - started_at
        self._steps.committed(committed.batch, output)
        self.counters["prompt_tokens"] += committed.batch.num_tokens
        self.counters["generated_tokens"] += len(committed.token_ids)
        for key, num_computed in committed.progressed:
            entry = self._entries[key]
            self._move(entry, PrefillEvent.CHUNK, PrefillState.RUNNING)
            num_ready = num_computed // self._hello.block_size * self._hello.block_size
            if num_ready > entry.num_offered_tokens:
                self._offer(entry, self._scheduler.block_ids(key), num_ready)
        for done in committed.prompts:
            self._on_prompt_done(self._entries[done.key], done)
        self._link.flush(committed.rows)

    def step_failed(self, error: str) -> None:
        """The runner could not execute the oldest step in flight: its requests fail, all others stay."""
        for key in self._scheduler.fail_step():
            self._fail(self._entries[key], "failed", error)
        self._link.flush()

    def router_gone(self) -> None:
        """The shell found a lasting gap in the router's messages."""
        self.end_all("router_gone")

    # ---- what shells and tests may ask

    @property
    def idle(self) -> bool:
        """Nothing is live: no request, no lease."""
        return not self._entries and self._scheduler.idle

    def keys(self) -> set[RequestKey]:
        """Attempts that are not gone."""
        return set(self._entries)

    @property
    def drained(self) -> bool:
        return self._link.draining and self.idle

    def leases(self) -> list[Lease]:
        """All live leases."""
        return [
            Lease(entry.lease_index, entry.lease_id, entry.block_ids or self._scheduler.block_ids(key))
            for key, entry in self._entries.items()
            if entry.lease_id
        ]

    def check_idle(self) -> None:
        """Raises ProtocolError unless every block is free and no word is set (I2)."""
        self._scheduler.check_idle()
        if self._leases.num_live:
            raise ProtocolError(f"{self._leases.num_live} lease words are taken in an idle prefill engine")

    # ---- messages

    def _on_generate(self, envelope: Envelope) -> None:
        message = cast(EngineRequest, envelope.message)
        if message.key in self._entries:
            raise ProtocolError(f"{message.key} was dispatched twice")
        entry = Prefill(message, Timeline(self._clock, "prefill_queue"))
        self._entries[message.key] = entry
        self._move(entry, PrefillEvent.REQUEST, PrefillState.WAITING)
        self.counters["requests"] += 1
        if self._link.draining:
            self._end(entry, PrefillEvent.CANNOT_SERVE, "failed", "draining")
            return
        if message.deadline_s is not None:
            self.timers.set(("deadline", message.key), self._clock() + message.deadline_s)
        if message.sampling.grammar is None:
            self._join(entry)
            return
        try:
            self._grammars.begin(message.key, message.sampling.grammar)
        except InvalidRequest as error:
            self._end(entry, PrefillEvent.CANNOT_SERVE, "invalid", str(error))

    def _join(self, entry: Prefill, fault: str = "") -> None:
        """The attempt joins the scheduler's queue, unless it cannot be served. `fault`: of its grammar."""
        if fault:
            self._end(entry, PrefillEvent.CANNOT_SERVE, "invalid", fault)
            return
        try:
            self._scheduler.add(Request.from_message(entry.request, kv="producer", arrival=self._clock()))
        except InvalidRequest as error:
            self._end(entry, PrefillEvent.CANNOT_SERVE, "failed", str(error))

    def _on_abort(self, envelope: Envelope) -> None:
        message = cast(AbortRequest, envelope.message)
        entry = self._entries.get(message.key)
        if entry is None:
            self.counters["ignored"] += 1
        elif not entry.lease_id:
            self._end(entry, PrefillEvent.ABORT, None)
        elif message.reason == "peer_lost":
            self._tell_revoked(entry, "peer lost")
            self._forget(entry, PrefillEvent.PEER_LOST)
        elif entry.state is PrefillState.REVOKING:
            self._move(entry, PrefillEvent.ABORT, PrefillState.REVOKING)
            entry.report = None
        else:
            self._revoke(entry, PrefillEvent.ABORT, message.reason, report=None)

    def _on_release(self, envelope: Envelope) -> None:
        message = cast(KVRelease, envelope.message)
        entry = self._entries.get(message.key)
        if entry is None or entry.lease_id != message.lease_id:
            self.counters["ignored"] += 1
            return
        self.counters[message.outcome] += 1
        if message.outcome == "consumed":
            if not entry.final_sent:
                raise ProtocolError(f"{message.key}: consumed before the final handoff")
            self._forget(entry, PrefillEvent.CONSUMED)
        elif entry.state is PrefillState.REVOKING:
            if entry.report:
                self._report(entry, entry.report, message.reason or "lease refused")
            self._forget(entry, PrefillEvent.REFUSED)
        else:
            if not message.router_knows:
                self._report(entry, "returned", message.reason)
            self._tell_revoked(entry, "refused")
            self._forget(entry, PrefillEvent.REFUSED)

    def _on_renew(self, envelope: Envelope) -> None:
        for key, lease_id in cast(KVRenew, envelope.message).leases:
            entry = self._entries.get(key)
            if entry is not None and entry.lease_id == lease_id and entry.state is PrefillState.LEASED:
                self.timers.set(("lease", key), self._clock() + self._config.lease_s)

    # ---- steps

    def _on_prompt_done(self, entry: Prefill, done: PromptDone) -> None:
        """The last chunk was computed: ownership of the blocks passes from the scheduler to this entry."""
        request = entry.request
        entry.block_ids = done.block_ids
        self._link.stages(request.key, request.request_number, entry.timeline.close(), entry.num_cached_tokens)
        if done.finish_reason is None:
            self._offer(entry, done.block_ids, len(request.prompt_token_ids), done.first_token_id, done.first_logprobs)
            self._move(entry, PrefillEvent.LAST_CHUNK, PrefillState.LEASED)
            self.timers.set(("lease", request.key), self._clock() + self._config.lease_s)
            return
        self._link.end(request.key, request.request_number, "finished", finish_reason=done.finish_reason)
        if entry.lease_id:
            self._revoke(entry, PrefillEvent.LAST_CHUNK, "finished", report=None)
        else:
            self._forget(entry, PrefillEvent.LAST_CHUNK)

    def _offer(
        self,
        entry: Prefill,
        block_ids: list[int],
        num_ready: int,
        first_token_id: int | None = None,
        first_logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Writes the word once, then sends a handoff. The blocks' bytes are in memory: their step has been
        committed.
        """
        if not entry.lease_id:
            index = self._leases.allocate()
            if index is None:
                raise ProtocolError("no lease word is free: the table must have one per block")
            entry.lease_index, entry.lease_id = index, self._leases.next_lease_id()
            self._leases.write(index, entry.lease_id)
        if self._checksum is not None:
            num_checked, num_blocks = len(entry.checksums), -(-num_ready // self._hello.block_size)
            entry.checksums += self._checksum(block_ids[num_checked:num_blocks])
        entry.num_offered_tokens = num_ready
        entry.final_sent = first_token_id is not None
        self.counters["handoffs"] += 1
        handoff = KVHandoff(
            key=entry.request.key,
            lease_id=entry.lease_id,
            lease_index=entry.lease_index,
            lease_s=self._config.lease_s,
            block_ids=tuple(block_ids),
            num_ready_tokens=num_ready,
            final=entry.final_sent,
            first_token_id=first_token_id,
            first_logprobs=first_logprobs,
            layout_fingerprint=self._hello.layout_fingerprint,
            checksums=entry.checksums,
        )
        self.outbox.append((entry.peer, handoff))

    # ---- timers and the like

    def _on_lease_timer(self, entry: Prefill) -> None:
        log.warning(
            "lease expired", extra=about(entry.request.key) | {"peer": label(entry.peer), "lease_id": entry.lease_id}
        )
        self.counters["expired"] += 1
        self._report(entry, "failed", "lease_expired")
        self._tell_revoked(entry, "lease_expired")
        self._forget(entry, PrefillEvent.LEASE_TIMER)

    def _on_revoke_timer(self, entry: Prefill) -> None:
        log.warning(
            "revoke expired", extra=about(entry.request.key) | {"peer": label(entry.peer), "lease_id": entry.lease_id}
        )
        self.counters["expired"] += 1
        if entry.report:
            self._report(entry, entry.report, "revoke_expired")
        self._forget(entry, PrefillEvent.REVOKE_TIMER)

    def _on_deadline(self, entry: Prefill) -> None:
        if not entry.lease_id:
            self._end(entry, PrefillEvent.DEADLINE, "aborted", "deadline")
        else:
            self._report(entry, "aborted", "deadline")
            self._revoke(entry, PrefillEvent.DEADLINE, "deadline", report=None)

    def forget_peers(self) -> None:
        """Nothing of other engines outlives the requests that named them."""

    def end_all(self, because: Ending) -> None:
        """Ends all keys, and says so: a router that was only slow must not wait for them. Of an older router's keys
        nothing is said.
        """
        event, reason = (
            (PrefillEvent.DRAIN_DEADLINE, "drained")
            if because == "drain_deadline"
            else (PrefillEvent.ROUTER_GONE, ROUTER_SILENT)
        )
        if self._entries and because == "router_gone":
            log.info("the router is gone", extra={"num_open": len(self._entries)})
        for entry in list(self._entries.values()):
            if not entry.lease_id:
                self._end(entry, event, "returned", reason)
            elif entry.state is PrefillState.REVOKING:
                continue
            elif because == "drain_deadline":
                self._revoke(entry, event, reason, report="returned")
            else:
                self._report(entry, "returned", reason)
                self._revoke(entry, event, reason, report=None)

    # ---- endings; every path out goes through `_forget`

    def _fail(self, entry: Prefill, kind: EndKind, error: str) -> None:
        """A step could not be executed, or not for this attempt."""
        log.warning("step failed", extra=about(entry.request.key) | {"error": error})
        if not entry.lease_id:
            self._end(entry, PrefillEvent.STEP_FAILED, kind, error)
        else:
            self._revoke(entry, PrefillEvent.STEP_FAILED, "step failed", report=kind)

    def _end(self, entry: Prefill, event: PrefillEvent, kind: EndKind | None, error: str = "") -> None:
        """Ends an attempt that was never offered."""
        if kind is not None:
            self._report(entry, kind, error)
        self._forget(entry, event)

    def _report(self, entry: Prefill, kind: EndKind, error: str) -> None:
        """Tells the router of an end that is not the router's doing, and what the prefix cache had if the attempt
        began.
        """
        key, request_number = entry.request.key, entry.request.request_number
        if entry.state is not PrefillState.WAITING:
            self._link.stages(key, request_number, {}, entry.num_cached_tokens)
        self._link.end(key, request_number, kind, error=error)

    def _tell_revoked(self, entry: Prefill, reason: str) -> None:
        self.outbox.append((entry.peer, KVRevoke(key=entry.request.key, lease_id=entry.lease_id, reason=reason)))

    def _revoke(self, entry: Prefill, event: PrefillEvent, reason: str, *, report: EndKind | None) -> None:
        """Stops computing, asks decode for the lease back, and waits for its answer or the revoke timer."""
        key = entry.request.key
        self._move(entry, event, PrefillState.REVOKING)
        if entry.block_ids is None:
            entry.block_ids = self._scheduler.detach(key)
        entry.report = report
        self.timers.set(("revoke", key), self._clock() + self._config.revoke_s)
        self._tell_revoked(entry, reason)

    def _forget(self, entry: Prefill, event: PrefillEvent) -> None:
        """Passes the fence, frees the blocks, forgets the attempt. A step in flight keeps its blocks until its commit:
        the block manager sees to it.
        """
        key = entry.request.key
        self._move(entry, event, PrefillState.GONE)
        if entry.lease_id:
            self._leases.clear(entry.lease_index)
            self._leases.free(entry.lease_index)
        if entry.block_ids is None:
            self._scheduler.abort(key)
        else:
            self._scheduler.blocks.free(entry.block_ids)
        self._grammars.forget(key)
        del self._entries[key]

    def _move(self, entry: Prefill, event: PrefillEvent, state: PrefillState) -> None:
        """Timers that the new state does not list are cancelled."""
        entry.state = advance(PREFILL_TABLE, entry.state, event, state)
        for kind in _TIMERS - PREFILL_TIMERS[state]:
            self.timers.cancel((kind, entry.request.key))

    def status(self, seq: int) -> ReplicaStatus:
        """The link asks for it and sends it. `seq` counts the statuses."""
        return self._steps.status(self._scheduler, seq, draining=self._link.draining, num_leases=self._leases.num_live)
