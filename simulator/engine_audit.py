"""One life of an engine, counted from outside and compared with its own counters. Checks I6 (leases), I9 (arrived
sequences get seats), I10 (counters) and I14 (an answer gets a token in every step).
"""

from collections import Counter

from decode_pool.service import DecodeService
from engine.runner import Batch
from engine.scheduler.sequence import Sequence
from kv_transfer.lease import LeaseTable, Words
from protocol.clock import VirtualClock
from protocol.messages import (
    ROUTER_ID,
    AbortRequest,
    EngineRequest,
    Envelope,
    KVHandoff,
    KVRelease,
    KVRevoke,
    RequestKey,
    StepTokens,
)
from simulator.refusals import Refusals
from simulator.replica import Replica
from simulator.violation import Violation

_COUNTERS = ("requests", "steps", "scheduled_tokens", "generated_tokens")
_PREFILL_COUNTERS = (*_COUNTERS, "prompt_tokens", "handoffs", "consumed", "refused", "expired")
_DECODE_COUNTERS = (*_COUNTERS, "pulls")


class WatchedLeases(LeaseTable):
    """Tells the audit of every word that is written or cleared."""

    def __init__(self, words: Words, epoch: int, audit: "EngineAudit") -> None:
        super().__init__(words, epoch)
        self._audit = audit

    def write(self, index: int, lease_id: int) -> None:
        super().write(index, lease_id)
        self._audit.lease_begins(lease_id)

    def clear(self, index: int) -> None:
        self._audit.lease_ends(int(self._words[index]))
        super().clear(index)


class EngineAudit:
    """Every method raises Violation if an invariant does not hold."""

    def __init__(self, seed: int, clock: VirtualClock, replica: Replica, refusals: Refusals) -> None:
        self._seed, self._clock, self._replica, self._name = seed, clock, replica, replica.name
        self._refusals = refusals
        self._counted: Counter[str] = Counter()
        """What was counted, by the name of the service's own counter."""
        self._leases: dict[int, str] = {}
        """How each lease ended, by its id; "" while it is live."""
        self._met: Counter[RequestKey] = Counter()
        """How often a decode engine came to know of an attempt. It may release the lease of the attempt as often."""
        self._repeats: set[tuple[int, int, int]] = set()
        """(router epoch, request number, attempt) of attempts whose first row will repeat the token that a prefill
        engine sampled.
        """
        self._router_epoch = 0
        """The newest router epoch that the engine has met."""
        self._num_seats = 0
        """How many seats were free before the schedule."""

    def _violation(self, what: str) -> Violation:
        return Violation(self._seed, self._clock.now, what)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._violation(what)

    # ---- leases: I6

    def lease_table(self, words: Words) -> LeaseTable:
        return WatchedLeases(words, self._replica.address.epoch, self)

    def lease_begins(self, lease_id: int) -> None:
        self._require(lease_id not in self._leases, f"I6: lease {lease_id:#x} of {self._name} begins twice")
        self._leases[lease_id] = ""

    def lease_ends(self, lease_id: int) -> None:
        """A lease ends. Only decode's answer, a lost peer or a timer may end it: whatever else ends an attempt revokes
        its lease and waits.
        """
        self._require(self._leases.get(lease_id) == "", f"I6: lease {lease_id:#x} of {self._name} ends twice")
        message = self._replica.doing.message if self._replica.doing is not None else None
        if isinstance(message, KVRelease) and message.lease_id == lease_id:
            how: str = message.outcome
        elif isinstance(message, AbortRequest) and message.reason == "peer_lost":
            how = "peer_lost"
        elif message is None and self._replica.service.counters["expired"] > self._counted["expired"]:
            how = "expired"
        else:
            cause = "without an answer" if message is None else f"at a {type(message).__name__}"
            raise self._violation(f"I6: lease {lease_id:#x} of {self._name} ends {cause}")
        self._leases[lease_id] = how
        self._counted[how] += 1

    # ---- at the wire

    def hears(self, envelope: Envelope) -> None:
        """The service is about to handle a message."""
        message = envelope.message
        if envelope.sender.replica_id == ROUTER_ID:
            self._router_epoch = max(self._router_epoch, envelope.sender.epoch)
        self._refusals.heard(self._replica, envelope)
        if not isinstance(message, EngineRequest | KVHandoff | KVRevoke):
            return
        known = self._replica.service.keys()
        self._met[message.key] += message.key not in known
        if envelope.receiver != self._replica.address:
            return
        if isinstance(message, KVHandoff):
            self._router_epoch = max(self._router_epoch, message.key.router_epoch)
        elif isinstance(message, EngineRequest) and message.key.router_epoch == self._router_epoch:
            self._counted["requests"] += 1
            if message.role == "decode":
                self._repeats.add((message.key.router_epoch, message.request_number, message.key.attempt))

    def says(self, envelope: Envelope) -> None:
        """The service has put out a message. I6: decode answers once for each time it came to know of an attempt."""
        message = envelope.message
        if isinstance(message, StepTokens):
            self._counted["generated_tokens"] += len(message.token_ids) - self._num_repeated(message)
            self._refusals.said(message)
        elif isinstance(message, KVHandoff):
            self._counted["handoffs"] += 1
        elif isinstance(message, KVRelease):
            self._met[message.key] -= 1
            once = self._met[message.key] >= 0
            self._require(once, f"I6: {self._name} releases lease {message.lease_id:#x} again: {message.outcome}")

    def _num_repeated(self, message: StepTokens) -> int:
        """How many tokens of the message repeat a token that a prefill engine sampled."""
        if not self._repeats:
            return 0
        rows = zip(message.request_numbers.tolist(), message.attempts.tolist(), strict=True)
        repeated = self._repeats.intersection(
            (message.router_epoch, request_number, attempt) for request_number, attempt in rows
        )
        self._repeats -= repeated
        return len(repeated)

    # ---- steps and pulls

    def commits(self, batch: Batch) -> None:
        self._counted.update(steps=1, scheduled_tokens=batch.num_tokens, prompt_tokens=batch.num_tokens)

    def pulls(self, count: int) -> None:
        """So many pulls have started."""
        self._counted["pulls"] += count

    def standing(self) -> list[Sequence]:
        """The sequences that have arrived and have no seat, before a schedule. I9: each owns the blocks that its
        next step needs.
        """
        self._num_seats = self._replica.config.max_num_seqs - self._replica.scheduler.num_running
        standing, blocks = self._replica.scheduler.arrived, self._replica.scheduler.blocks
        for sequence in standing:
            request, num_prompt = sequence.request, len(sequence.request.prompt_token_ids)
            num_slots = min(num_prompt + 1, num_prompt + request.max_tokens - 1)
            owned = len(sequence.blocks) * self._replica.config.block_size >= num_slots and blocks.all_owned(
                sequence.blocks
            )
            self._require(owned, f"I9: {request.key.request_id} arrived at {self._name} and lacks blocks")
        return standing

    def check_step(self, standing: list[Sequence], batch: Batch | None) -> None:
        """Checks a schedule. I9: of the sequences that were `standing` before it, as many have seats now as seats were
        free; an idle engine leaves none standing. I14: every running answer is in the batch, whatever else the budget
        went to; only the last sequence left may lack blocks.
        """
        scheduler = self._replica.scheduler
        if batch is None and self._replica.executing:
            return  # put off until the step in flight has committed
        if scheduler.has_seat and (arrived := scheduler.arrived):
            left = [sequence.request.key.request_id for sequence in arrived if batch is None or sequence in standing]
            self._require(
                len(left) <= max(0, len(standing) - self._num_seats), f"I9: {self._name} leaves {left} standing"
            )
        if batch is not None and (passed_over := scheduler.passed_over):
            alone = passed_over == scheduler.running_ids[:1]
            self._require(
                alone, f"I14: a step of {self._name} gives {batch.num_scheduled_tokens()}, and {passed_over} nothing"
            )

    # ---- the end

    def check(self) -> None:
        """At the end of the engine's life, or of the run, the engine's counters must say what happened."""
        service = self._replica.service
        for name in _PREFILL_COUNTERS if self._replica.is_prefill else _DECODE_COUNTERS:
            told, counted = service.counters[name], self._counted[name]
            self._require(told == counted, f"I10: {self._name} counts {told:g} {name}, {counted} were")
        live = [lease_id for lease_id, how in self._leases.items() if not how]
        num_held = 0 if isinstance(service, DecodeService) else len(service.leases())
        self._require(len(live) == num_held, f"I6: {self._name} holds {num_held} leases, {len(live)} have not ended")
