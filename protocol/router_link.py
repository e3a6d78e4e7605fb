"""An engine's end of the link to the router: which router counts, is it alive, and what goes to it after a step.

One router epoch counts at a time, the newest seen. Its predecessor's keys are dead from that moment on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from protocol.clock import Clock
from protocol.messages import (
    ROUTER_ID,
    Address,
    End,
    EndKind,
    FinishReason,
    Int32,
    Int64,
    Logprobs,
    Message,
    ReplicaStatus,
    RequestKey,
    StageSeconds,
    StepTokens,
)


class Rows(NamedTuple):
    """Token rows of one committed step, as `StepTokens` wants them. Each array: [num_rows], `token_ids`: [sum(counts)]."""

    slots: Int64
    attempts: Int32
    offsets: Int32
    counts: Int32
    token_ids: Int32
    logprobs: tuple[Logprobs, ...] = ()


ROUTER_SILENT = "the router was silent"
"""Why an engine has ended all keys of a router that it has not heard for `router_timeout_s`."""

_NONE = np.empty(0, dtype=np.int32)
_NO_ROWS = Rows(np.empty(0, dtype=np.int64), _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How often an engine speaks to the router, and how long a silent router counts as alive."""

    status_interval_s: float = 1.0
    router_timeout_s: float = 10.0


class RouterLink:
    """Counts router epochs and silence, gathers ends and stage times, and writes `StepTokens` and `ReplicaStatus` to the outbox."""

    def __init__(self, config: LinkConfig, clock: Clock, outbox: list[tuple[Address, Message]]) -> None:
        self._clock = clock
        self._outbox = outbox
        self._timeout_s = config.router_timeout_s
        self._interval_s = config.status_interval_s
        self.epoch = 0
        """Newest router epoch seen; 0: none yet."""
        self._heard_at = clock()
        self._lost = True
        self._status_at = clock()
        self._status_seq = 0
        self._ends: list[End] = []
        self._stages: list[StageSeconds] = []

    @property
    def address(self) -> Address:
        return Address(ROUTER_ID, self.epoch)

    def observe(self, router_epoch: int) -> bool:
        """Notes an epoch met in a message. True if it is newer than all before: every older key is to be ended."""
        if router_epoch <= self.epoch:
            return False
        self.epoch = router_epoch
        self._heard_at = self._clock()
        self._lost = False
        self._ends.clear()
        self._stages.clear()
        return True

    def heard(self) -> None:
        """A message of the present router has come."""
        self._heard_at = self._clock()
        self._lost = False

    def silent(self) -> bool:
        """True once, when the router has been silent for `router_timeout_s`; again only after it was heard."""
        if self._lost or self._clock() - self._heard_at < self._timeout_s:
            return False
        self._lost = True
        return True

    def end(self, key: RequestKey, slot: int, kind: EndKind, *, finish_reason: FinishReason | None = None, error: str = "") -> None:
        """Adds the end of an attempt to the next `StepTokens`. Keys of an older router are ignored: nobody would read it."""
        if key.router_epoch == self.epoch:
            self._ends.append(End(slot, key.attempt, kind, finish_reason, error))

    def stages(self, key: RequestKey, slot: int, seconds: dict[str, float], num_cached_tokens: int | None = None) -> None:
        """Adds stage times of an attempt to the next `StepTokens`, and what the prefix cache had of it where that is said."""
        if key.router_epoch == self.epoch:
            self._stages.append(StageSeconds(slot, key.attempt, seconds, num_cached_tokens))

    def flush(self, rows: Rows | None = None) -> None:
        """Writes one `StepTokens` if there is anything to say."""
        if not (self._ends or self._stages or (rows is not None and len(rows.slots))):
            return
        if rows is None:
            rows = _NO_ROWS
        message = StepTokens(
            router_epoch=self.epoch,
            slots=rows.slots,
            attempts=rows.attempts,
            offsets=rows.offsets,
            counts=rows.counts,
            token_ids=rows.token_ids,
            ends=tuple(self._ends),
            stages=tuple(self._stages),
            logprobs=rows.logprobs,
        )
        self._ends.clear()
        self._stages.clear()
        self._outbox.append((self.address, message))

    def status_due(self) -> int | None:
        """The sequence number of the status to send now, or None if it is not yet time (or there is no router)."""
        if not self.epoch or self._clock() < self._status_at:
            return None
        self._status_at = self._clock() + self._interval_s
        self._status_seq += 1
        return self._status_seq

    def status_soon(self) -> None:
        """Something the router must know: the next status is due now."""
        self._status_at = self._clock()

    def send_status(self, status: ReplicaStatus) -> None:
        self._outbox.append((self.address, status))
