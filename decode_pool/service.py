"""A decode engine's life of a request: D's table of the handoff protocol, row by row (states in kv_transfer/state.py).

 1. `EngineRequest`, role decode: waits without blocks for an offer                     WAITING
    (a handoff that comes first is kept, without blocks)                                EARLY
 2. offered, and its turn in the scheduler's queue: the whole destination is reserved   RESERVED
 3. pulls what it lacks, once the peer's cache is open; after each pull reads the
    lease word, then the blocks count                                                   RESERVED
 4. final and all there: `KVRelease(consumed)`, joins the batch                         RUNNING
 5. one row of `StepTokens` per step; the first repeats the prefill engine's token      RUNNING
 6. ended while a pull still writes: the destination stays ours until that is terminal  DRAINING
    Role colocated skips 2 to 4: the same scheduler computes the prompt here.

Safety is one order, kept in `Pulls.ended`: bytes complete, barrier, then read the word. Only then may blocks enter the
prefix cache.

The file has more than 300 lines because it is one state table, which is read row by row.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

from decode_pool.pulls import PullEnd, Pulls
from engine.parts import EngineParts
from engine.runner import Batch, StepOutput
from engine.scheduler.outcome import Events
from engine.scheduler.sequence import KVRole, Request
from engine.scheduler.step_counts import PREFIX_COUNTERS, StepCounts
from kv_transfer.checksum import checksum_of
from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.state import DECODE_TABLE, DECODE_TIMERS, DecodeEvent, DecodeState, DecodeTimer, advance
from kv_transfer.transport import Connector
from protocol.errors import ChecksumMismatch, InvalidRequest, LeaseLost, ProtocolError, TransferError
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
    PeerDown,
    PeerUp,
    ReplicaStatus,
    RequestKey,
    RouterStatus,
)
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from protocol.router_link import ROUTER_SILENT, Ending, RouterLink
from protocol.timeline import Timeline
from protocol.timers import Timers

log = logging.getLogger(__name__)

_FAILURES: dict[type[TransferError], str] = {LeaseLost: "leases_lost", ChecksumMismatch: "checksum_failures"}
"""Counters of failed pulls. `pull_failures` counts all others."""
_COUNTERS = (
    *("requests", "prompt_tokens", *PREFIX_COUNTERS, "transferred_tokens", "generated_tokens"),
    *MODE_COUNTERS.values(),
    *REASON_COUNTERS.values(),
    *("recomputed_tokens", "swapped_bytes", "swap_seconds"),
    *("pulls", "pull_failures", "leases_lost", "checksum_failures", "pulled_bytes", "pull_seconds"),
    *("timers_fired", "ignored", *StepCounts.KEYS),
)
"""`prompt_tokens` were computed here and are counted when the prompt is complete; `recomputed_tokens` were computed
again after a preemption. Each preemption counts under its mode, and under the reason for that.
"""
_TIMERS: frozenset[DecodeTimer] = frozenset(get_args(DecodeTimer))


@dataclass(slots=True)
class Decode:
    """One attempt on this engine. The scheduler's sequence owns the reserved blocks; it is aborted only when no pull
    writes into them.
    """

    key: RequestKey
    timeline: Timeline
    state: DecodeState = DecodeState.GONE
    request: EngineRequest | None = None
    handoff: KVHandoff | None = None
    source: Address | None = None
    """The prefill replica that the handoff came from."""
    block_ids: list[int] | None = None
    """The destination, once it is reserved."""
    num_verified_tokens: int = 0
    """Tokens of the prompt whose KV lies here and was checked: own prefix hits, then pulls."""
    num_cached_tokens: int = 0
    pull_until: int = 0
    """What `num_verified_tokens` will be once the running pull is verified."""
    num_bytes: int = 0
    pull_seconds: float = 0.0


class DecodeService:
    """Decides; it executes nothing. A shell or the simulator calls `handle`, `tick`, `schedule` and `commit`, and sends
    what is in the outbox.
    """

    def __init__(self, engine: EngineParts, *, transport: Connector, config: TransferConfig, cache: KVCache) -> None:
        """`transport` pulls into `cache`."""
        self.address = engine.address
        self.outbox: list[tuple[Address, Message]] = []
        self._scheduler = engine.scheduler
        self._grammars = engine.grammars
        self._config = config
        self._hello = engine.hello
        self._block_bytes = cache.block_bytes
        self._clock = engine.clock
        self._entries: dict[RequestKey, Decode] = {}
        self._transport = transport
        self._pulls = Pulls(transport, engine.clock, checksum_of(cache.tensor) if config.checksum else None)
        self._num_early = 0
        self.timers: Timers[tuple[DecodeTimer, RequestKey]] = Timers()
        self.counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._steps = StepCounts(self.counters, engine.scheduler.config)
        handlers: dict[type, Callable[[Envelope], None]] = {
            EngineRequest: self._on_generate,
            AbortRequest: self._on_abort,
            KVHandoff: self._on_handoff,
            KVRevoke: self._on_revoke,
            PeerUp: self._on_peer_up,
            PeerDown: self._on_peer_down,
            RouterStatus: self._on_router_status,
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

    # ---- the verbs of a service

    def handle(self, envelope: Envelope) -> None:
        """Takes one message, in its sender's order. Messages of stale epochs are dropped; a stale handoff is refused,
        so that its lease ends soon.
        """
        message = envelope.message
        if isinstance(message, KVHandoff) and message.key not in self._entries:
            if envelope.receiver != self.address or message.key.router_epoch < self._link.epoch:
                self._refuse(envelope.sender, message.key, message.lease_id, "stale epoch")
                return
            self._link.meet(message.key.router_epoch)
        self._link.handle(envelope)

    def tick(self) -> None:
        """Looks at grammars that are compiled, peers that have opened or failed to, ended pulls, timers, the router's
        silence and the drain deadline, and sends the status when it is due.
        """
        now = self._clock()
        for key, fault in self._grammars.ended():
            self._join(self._entries[key], fault)
        if connected := self._pulls.connected():
            for peer, error in connected:
                if error is not None:
                    self._not_opened(peer, error)
            self._pull_waiting()
        for end in self._pulls.ended():
            self._on_pull_end(self._entries[end.key], end)
        if due := self.timers.due(now):
            self._fire(due, now)
        self._link.tick()

    def _fire(self, due: list[tuple[DecodeTimer, RequestKey]], now: float) -> None:
        """Does what timers say whose time has come. Renewals go out in one message to each prefill engine. A pull that
        does not end is asked to again and again: what it writes into is free only when it has ended. A peer for which a
        pull has waited as long counts as one that cannot be opened.
        """
        renewals: dict[Address, list[tuple[RequestKey, int]]] = {}
        for kind, key in due:
            entry = self._entries.get(key)
            if entry is None or kind not in DECODE_TIMERS[entry.state]:
                continue  # ended by a timer that was due in the same tick
            self.counters["timers_fired"] += kind != "renew"
            if kind == "renew" and entry.source is not None and entry.handoff is not None:
                renewals.setdefault(entry.source, []).append((key, entry.handoff.lease_id))
                self.timers.set(("renew", key), now + self._config.lease_s / 3)
            elif kind == "pull" and key in self._pulls:
                self._pulls.cancel(key)
                self.timers.set(("pull", key), now + self._config.pull_timeout_s)
            elif kind == "pull" and entry.source is not None:
                self._not_opened(entry.source, self._pulls.give_up(entry.source))
                self._pull_waiting()
            elif kind == "early":
                self._forget(entry, DecodeEvent.EARLY_TIMER)
            elif kind == "deadline":
                self._leave(entry, DecodeEvent.DEADLINE, "aborted", "deadline")
        self.outbox.extend((peer, KVRenew(leases=tuple(leases))) for peer, leases in renewals.items())

    def schedule(self) -> Batch | None:
        """Returns the next batch, if there is one. Where a reserved prompt was cached here whole, it has arrived
        meanwhile and nothing else would wake us: then the scheduler is asked again.
        """
        batch = None
        arrived = True
        while batch is None and arrived:
            started_at = self._clock()
            batch = self._scheduler.schedule()
            events = self._scheduler.take_events()
            self.counters["scheduler_seconds"] += self._clock() - started_at
            arrived = self._apply(events)
        self._link.flush()
        if batch is not None:
            self._steps.scheduled(batch)
        return batch

    def _apply(self, events: Events) -> bool:
        """Takes up what the scheduler has decided beside the batch. Returns True if a sequence reserved its blocks and
        has arrived at once.
        """
        for key, num_cached in events.admitted:
            entry = self._entries[key]
            if entry.state is DecodeState.RUNNING:  # its KV came from elsewhere
                entry.timeline.enter("first_step")
                continue
            self._move(entry, DecodeEvent.ADMITTED, DecodeState.RUNNING)
            self._note_prefix(entry, num_cached)
            entry.timeline.enter("prefill")
        for reserved in events.reserved:
            entry = self._entries[reserved.key]
            self._move(entry, DecodeEvent.RESERVED, DecodeState.RESERVED)
            entry.block_ids = reserved.block_ids
            entry.num_verified_tokens = reserved.num_cached_tokens
            self._note_prefix(entry, reserved.num_cached_tokens)
            if entry.handoff is not None and entry.handoff.final:
                entry.timeline.enter("transfer")
            self._pull_more(entry)
        for choice in events.choices:
            self.counters[MODE_COUNTERS[choice.mode]] += 1
            self.counters[REASON_COUNTERS[choice.reason]] += 1
        for key in events.returned:
            self._leave(self._entries[key], DecodeEvent.RETURNED, "returned", "preempted")
        for key, finish_reason in events.ended:
            entry = self._entries[key]
            self._link.end(key, self._request_number(entry), "finished", finish_reason=finish_reason)
            self._close_timeline(entry)
            self._forget(entry, DecodeEvent.FINISHED)
        reserved_keys = [reserved.key for reserved in events.reserved]
        return any(self._entries[key].state is DecodeState.RUNNING for key in reserved_keys if key in self._entries)

    def commit(self, output: StepOutput) -> None:
        """A step was executed: its tokens and ends go to the router in one message."""
        started_at = self._clock()
        for key, error in self._scheduler.failures(output):
            self._step_failed(key, "invalid", error)
        committed = self._scheduler.commit(output)
        counters = self.counters
        counters["scheduler_seconds"] += self._clock() - started_at
        self._steps.committed(committed.batch, output)
        counters["swapped_bytes"] += output.swapped_bytes
        counters["swap_seconds"] += output.swap_seconds
        counters["generated_tokens"] += len(committed.token_ids)
        for key in committed.first:
            entry = self._entries[key]
            entry.timeline.enter("decode")
            if entry.handoff is None:
                counters["prompt_tokens"] += self._num_prompt_tokens(entry) - entry.num_cached_tokens
                self._link.stages(key, self._request_number(entry), {}, entry.num_cached_tokens)
            else:
                counters["generated_tokens"] -= 1  # the prefill engine sampled it
        for finished in committed.finished:
            entry = self._entries[finished.key]
            self._link.end(finished.key, finished.request_number, "finished", finish_reason=finished.finish_reason)
            self._close_timeline(entry)
            self._forget(entry, DecodeEvent.FINISHED)
        self._link.flush(committed.rows)

    def step_failed(self, error: str) -> None:
        """The runner could not execute the oldest step in flight: its requests fail, and those that found its blocks;
        all others stay.
        """
        for key in self._scheduler.fail_step():
            self._step_failed(key, "failed", error)
        self._link.flush()

    def _step_failed(self, key: RequestKey, kind: EndKind, error: str) -> None:
        entry = self._entries[key]
        if entry.state is not DecodeState.DRAINING:  # else it has ended; a pull still writes into its blocks
            log.warning("step failed", extra=about(key) | {"error": error})
            self._leave(entry, DecodeEvent.STEP_FAILED, kind, error)

    def router_gone(self) -> None:
        """The shell found a lasting gap in the router's messages."""
        self.end_all("router_gone")

    # ---- what shells and tests may ask

    @property
    def idle(self) -> bool:
        """Nothing is live: no request, no early handoff, no pull."""
        return not self._entries and self._scheduler.idle

    def keys(self) -> set[RequestKey]:
        """Attempts that are not gone."""
        return set(self._entries)

    @property
    def drained(self) -> bool:
        return self._link.draining and self.idle

    def check_idle(self) -> None:
        """Raises ProtocolError unless every block is free and no timer is left (I2)."""
        self._scheduler.check_idle()
        if self._pulls or self._num_early:
            raise ProtocolError(
                f"an idle decode engine counts {len(self._pulls)} pulls and {self._num_early} early handoffs"
            )

    # ---- messages

    def _on_generate(self, envelope: Envelope) -> None:
        message = cast(EngineRequest, envelope.message)
        entry = self._entries.get(message.key)
        if entry is not None and entry.request is not None:
            raise ProtocolError(f"{message.key} was dispatched twice")
        if entry is None:
            entry = self._entries[message.key] = Decode(message.key, Timeline(self._clock, "prefill_wait"))
        else:
            self._num_early -= 1
        colocated = message.role == "colocated"
        if colocated:
            entry.timeline = Timeline(self._clock, "prefill_queue")
        entry.request = message
        self._move(entry, DecodeEvent.REQUEST, DecodeState.WAITING)
        self.counters["requests"] += 1
        if self._link.draining:
            self._leave(entry, DecodeEvent.CANNOT_SERVE, "failed", "draining")
            return
        if message.deadline_s is not None:
            self.timers.set(("deadline", message.key), self._clock() + message.deadline_s)
        if message.sampling.grammar is None:
            self._join(entry)
            return
        try:
            self._grammars.begin(message.key, message.sampling.grammar)
        except InvalidRequest as error:
            self._leave(entry, DecodeEvent.CANNOT_SERVE, "invalid", str(error))

    def _join(self, entry: Decode, fault: str = "") -> None:
        """The attempt joins the scheduler's queue, unless it cannot be served. `fault`: of its grammar."""
        assert entry.request is not None
        if fault:
            self._leave(entry, DecodeEvent.CANNOT_SERVE, "invalid", fault)
            return
        kv: KVRole = "local" if entry.request.role == "colocated" else "consumer"
        try:
            self._scheduler.add(Request.from_message(entry.request, kv=kv, arrival=self._clock()))
        except InvalidRequest as error:
            self._leave(entry, DecodeEvent.CANNOT_SERVE, "failed", str(error))
            return
        if entry.handoff is not None:
            self._accept_handoff(entry, entry.handoff)

    def _on_abort(self, envelope: Envelope) -> None:
        entry = self._entries.get(cast(AbortRequest, envelope.message).key)
        if entry is None or entry.request is None or entry.state is DecodeState.DRAINING:
            self.counters["ignored"] += 1
            return
        self._leave(entry, DecodeEvent.ABORT, None)

    def _on_handoff(self, envelope: Envelope) -> None:
        handoff = cast(KVHandoff, envelope.message)
        entry = self._entries.get(handoff.key)
        if entry is None:
            if self._num_early >= self._config.max_early_handoffs:
                log.warning("early handoffs are full", extra=about(handoff.key) | {"peer": label(envelope.sender)})
                self._refuse(
                    envelope.sender, handoff.key, handoff.lease_id, "early handoffs are full", router_knows=False
                )
                return
            entry = self._entries[handoff.key] = Decode(handoff.key, Timeline(self._clock, "prefill_wait"))
            self._num_early += 1
            self.timers.set(("early", handoff.key), self._clock() + handoff.lease_s)
        if entry.state is DecodeState.DRAINING:
            self.counters["ignored"] += 1
            return
        entry.source = envelope.sender
        entry.handoff = handoff
        if entry.request is None:
            self._move(entry, DecodeEvent.HANDOFF, DecodeState.EARLY)
        else:
            self._accept_handoff(entry, handoff)

    def _accept_handoff(self, entry: Decode, handoff: KVHandoff) -> None:
        """A handoff and its request are both here."""
        if handoff.layout_fingerprint != self._hello.layout_fingerprint:
            log.warning("layout refused", extra=about(entry.key) | {"peer": entry.source and label(entry.source)})
            self._leave(entry, DecodeEvent.BAD_HANDOFF, "failed", "the KV layouts of the two engines differ")
            return
        self._move(entry, DecodeEvent.HANDOFF, entry.state)
        if ("renew", entry.key) not in self.timers:
            self.timers.set(("renew", entry.key), self._clock() + self._config.lease_s / 3)
        if handoff.final:
            entry.timeline.enter("reserve_wait" if entry.state is DecodeState.WAITING else "transfer")
        if entry.state is DecodeState.WAITING:
            self._scheduler.offer(entry.key)
        else:
            self._pull_more(entry)

    def _on_revoke(self, envelope: Envelope) -> None:
        revoke = cast(KVRevoke, envelope.message)
        entry = self._entries.get(revoke.key)
        if entry is None:
            self._refuse(envelope.sender, revoke.key, revoke.lease_id, revoke.reason)
        elif entry.state in (DecodeState.DRAINING, DecodeState.RUNNING):
            self.counters["ignored"] += 1
        else:
            self._leave(entry, DecodeEvent.REVOKE, None, revoke.reason)

    def _on_peer_up(self, envelope: Envelope) -> None:
        """Begins to open a prefill replica's cache. What waited for an earlier epoch of it fails."""
        message = cast(PeerUp, envelope.message)
        self._pulls.connect(message.peer, message.endpoint)
        self._pull_waiting()

    def _on_peer_down(self, envelope: Envelope) -> None:
        self._pulls.disconnect(cast(PeerDown, envelope.message).peer)
        self._pull_waiting()

    def _not_opened(self, peer: Address, error: TransferError) -> None:
        """A cache that cannot be opened has no mapping: attempts that need it fail at their next pull and say so."""
        log.warning("the cache of a peer cannot be opened", extra={"peer": label(peer), "error": str(error)})
        self.counters["pull_failures"] += 1

    def _on_router_status(self, envelope: Envelope) -> None:
        message = cast(RouterStatus, envelope.message)
        self._scheduler.set_prefill_room(message.prefill_room_blocks, message.prefill_max_tokens)

    # ---- pulls

    def _pull_more(self, entry: Decode) -> None:
        """Starts the next pull if more is ready than verified and none is under way; queues the request when nothing is
        missing. While the peer's cache is still being opened the pull waits, no longer than it may take itself.
        """
        handoff, block_ids = entry.handoff, entry.block_ids
        if entry.key in self._pulls or handoff is None or block_ids is None or entry.source is None:
            return
        if handoff.num_ready_tokens <= entry.num_verified_tokens:
            if handoff.final:
                self._arrive(entry, handoff)
            return
        if self._pulls.is_opening(entry.source):
            if ("pull", entry.key) not in self.timers:
                self.timers.set(("pull", entry.key), self._clock() + self._config.pull_timeout_s)
            return
        first = entry.num_verified_tokens // self._hello.block_size
        end = -(-handoff.num_ready_tokens // self._hello.block_size)
        try:
            self._pulls.start(
                entry.key,
                entry.source,
                handoff.block_ids[first:end],
                block_ids[first:end],
                lease_index=handoff.lease_index,
                lease_id=handoff.lease_id,
                checksums=handoff.checksums[first:end],
            )
        except TransferError as error:
            self._pull_failed(entry, error)
            return
        self._move(entry, DecodeEvent.PULL_STARTED, DecodeState.RESERVED)
        entry.pull_until = handoff.num_ready_tokens
        entry.num_bytes += (end - first) * self._block_bytes
        self.timers.set(("pull", entry.key), self._clock() + self._config.pull_timeout_s)
        self.counters["pulls"] += 1

    def _pull_waiting(self) -> None:
        """A peer has opened, failed to open or is gone: pulls that waited for it start, or fail at their start."""
        for entry in list(self._entries.values()):
            if entry.state is DecodeState.RESERVED:
                self._pull_more(entry)

    def _on_pull_end(self, entry: Decode, end: PullEnd) -> None:
        """A pull is terminal: its blocks count if the lease was live after the last byte, else the attempt fails."""
        self.timers.cancel(("pull", entry.key))
        entry.pull_seconds += end.seconds
        if entry.state is DecodeState.DRAINING:
            self._drop(entry, DecodeEvent.PULL_ENDED, "ended")
        elif end.error is not None:
            self._pull_failed(entry, end.error)
        else:
            self._move(entry, DecodeEvent.PULL_VERIFIED, DecodeState.RESERVED)
            entry.num_verified_tokens = entry.pull_until
            self._scheduler.publish(entry.key, entry.num_verified_tokens)
            self._pull_more(entry)

    def _pull_failed(self, entry: Decode, error: TransferError) -> None:
        log.warning(
            "pull failed", extra=about(entry.key) | {"peer": entry.source and label(entry.source), "error": str(error)}
        )
        self.counters[_FAILURES.get(type(error), "pull_failures")] += 1
        self._leave(entry, DecodeEvent.PULL_FAILED, "failed", str(error))

    def _arrive(self, entry: Decode, handoff: KVHandoff) -> None:
        """All KV is here and was checked: the lease ends, the sequence joins the batch."""
        assert entry.source is not None and handoff.first_token_id is not None
        self._move(entry, DecodeEvent.ARRIVED, DecodeState.RUNNING)
        release = KVRelease(
            key=entry.key,
            lease_id=handoff.lease_id,
            outcome="consumed",
            num_bytes=entry.num_bytes,
            seconds=entry.pull_seconds,
        )
        self.outbox.append((entry.source, release))
        self.counters["transferred_tokens"] += self._num_prompt_tokens(entry) - entry.num_cached_tokens
        self.counters["pulled_bytes"] += entry.num_bytes
        self.counters["pull_seconds"] += entry.pull_seconds
        entry.timeline.enter("decode_queue")
        self._scheduler.arrive(entry.key, handoff.first_token_id, handoff.first_logprobs)

    # ---- the router

    def forget_peers(self) -> None:
        """An engine that died while there was no router is never told of: what is still open is opened again."""
        self._pulls.disconnect()

    def end_all(self, because: Ending) -> None:
        """Ends all keys, and says so: a router that was only slow must not wait for them. Of an older router's keys
        nothing is said.
        """
        event, reason = (
            (DecodeEvent.DRAIN_DEADLINE, "drained")
            if because == "drain_deadline"
            else (DecodeEvent.ROUTER_GONE, ROUTER_SILENT)
        )
        if because == "router_gone":
            self._scheduler.set_prefill_room(0, 0)
            if self._entries:
                log.info("the router is gone", extra={"num_open": len(self._entries)})
        for entry in list(self._entries.values()):
            if entry.state is not DecodeState.DRAINING:
                self._leave(entry, event, "returned", reason)

    # ---- endings; every path out goes through `_forget`

    def _leave(self, entry: Decode, event: DecodeEvent, kind: EndKind | None, reason: str = "") -> None:
        """Ends an attempt for the given reason, telling the router if the reason is ours; waits for a pull that is
        still writing.
        """
        if kind is not None and entry.request is not None:
            if entry.handoff is None and entry.state is DecodeState.RUNNING:
                self._link.stages(entry.key, entry.request.request_number, {}, entry.num_cached_tokens)
            self._link.end(entry.key, entry.request.request_number, kind, error=reason)
        if entry.key in self._pulls:
            self._move(entry, event, DecodeState.DRAINING)
        else:
            self._drop(entry, event, reason)

    def _drop(self, entry: Decode, event: DecodeEvent, reason: str) -> None:
        """Refuses the lease unless it was consumed, then frees the destination."""
        if entry.handoff is not None and entry.source is not None and entry.state is not DecodeState.RUNNING:
            knows = entry.request is not None
            self._refuse(entry.source, entry.key, entry.handoff.lease_id, reason, router_knows=knows)
        self._forget(entry, event)

    def _refuse(self, peer: Address, key: RequestKey, lease_id: int, reason: str, *, router_knows: bool = True) -> None:
        """Where `router_knows` is False, the attempt ends here, and without its request nobody here can tell the
        router.
        """
        release = KVRelease(key=key, lease_id=lease_id, outcome="refused", reason=reason, router_knows=router_knows)
        self.outbox.append((peer, release))

    def _forget(self, entry: Decode, event: DecodeEvent) -> None:
        """Frees the blocks and forgets the attempt. A step in flight keeps its blocks until its commit: the block
        manager sees to it.
        """
        if entry.state is DecodeState.EARLY:
            self._num_early -= 1
        self._move(entry, event, DecodeState.GONE)
        self._scheduler.abort(entry.key)
        self._grammars.forget(entry.key)
        del self._entries[entry.key]

    def _move(self, entry: Decode, event: DecodeEvent, state: DecodeState) -> None:
        """Timers that the new state does not list are cancelled."""
        entry.state = advance(DECODE_TABLE, entry.state, event, state)
        for kind in _TIMERS - DECODE_TIMERS[state]:
            self.timers.cancel((kind, entry.key))

    def _note_prefix(self, entry: Decode, num_cached: int) -> None:
        """Notes what this engine's own prefix cache had of a prompt, once for each attempt."""
        entry.num_cached_tokens = num_cached
        self._steps.looked_up(entry.key, num_cached, self._num_prompt_tokens(entry))

    def _num_prompt_tokens(self, entry: Decode) -> int:
        return 0 if entry.request is None else len(entry.request.prompt_token_ids)

    def _request_number(self, entry: Decode) -> int:
        if entry.request is None:
            raise ProtocolError(f"{entry.key} has no request")
        return entry.request.request_number

    def _close_timeline(self, entry: Decode) -> None:
        seconds = entry.timeline.close()
        seconds.pop("prefill_wait", None)  # the prefill engine counts it
        self._link.stages(entry.key, self._request_number(entry), seconds)

    def status(self, seq: int) -> ReplicaStatus:
        """The link asks for it and sends it. `seq` counts the statuses."""
        scheduler = self._scheduler
        self.counters.update(
            recomputed_tokens=scheduler.num_recomputed_tokens, padding_tokens=scheduler.num_padding_tokens
        )
        return self._steps.status(
            scheduler,
            seq,
            draining=self._link.draining,
            num_pulls=len(self._pulls),
            num_early_handoffs=self._num_early,
            transport=self._transport.name,
        )
