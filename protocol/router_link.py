"""An engine's end of the link to the router: which router counts and whether it is alive, what comes from it, and what
goes to it after a step.

One router epoch counts at a time, the newest that was seen. When a newer one is seen, the keys of older ones are dead.
This module has what is the same in both pools: who is heard, meeting a router and losing it, the drain, the status.
Each service has its own table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np

from protocol.arrays import Int32, Int64
from protocol.clock import Clock
from protocol.errors import ProtocolError
from protocol.messages import (
    ROUTER_ID,
    Address,
    Drain,
    End,
    EndKind,
    Envelope,
    FinishReason,
    Hello,
    Logprobs,
    Message,
    ReplicaStatus,
    RequestKey,
    StageSeconds,
    StepTokens,
)


class Rows(NamedTuple):
    """The token rows of one committed step, as `StepTokens` has them: `token_ids` is [sum(counts)], the other arrays
    are [num_rows].
    """

    request_numbers: Int64
    attempts: Int32
    offsets: Int32
    counts: Int32
    token_ids: Int32
    logprobs: tuple[Logprobs, ...] = ()


ROUTER_SILENT = "the router was silent"
"""The reason of an engine that ends all keys of a router because it has not heard of it for `router_timeout_s`."""

Ending = Literal["router_gone", "drain_deadline"]

_NONE = np.empty(0, dtype=np.int32)
_NO_ROWS = Rows(np.empty(0, dtype=np.int64), _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How often an engine sends its status to the router, and how long a silent router counts as alive."""

    status_interval_s: float = 1.0
    router_timeout_s: float = 10.0


class Linked(Protocol):
    """What a link needs of the service that it belongs to."""

    @property
    def idle(self) -> bool: ...

    def end_all(self, because: Ending) -> None:
        """Ends every attempt, as the table says for this event."""
        ...

    def forget_peers(self) -> None:
        """Another router speaks from now on: it tells anew of every engine that lives."""
        ...

    def status(self, seq: int) -> ReplicaStatus: ...

    def check_idle(self) -> None:
        """Raises ProtocolError if an idle engine holds anything."""
        ...


class RouterLink:
    """Handles what comes from the router (`handle`), looks at the time (`tick`) and sends what goes to the router
    (`flush`). `end` and `stages` add to the next `StepTokens`.
    """

    def __init__(
        self,
        service: Linked,
        config: LinkConfig,
        clock: Clock,
        *,
        address: Address,
        hello: Hello,
        handlers: Mapping[type, Callable[[Envelope], None]],
        outbox: list[tuple[Address, Message]],
        counters: dict[str, float],
    ) -> None:
        """`address` is the engine's own. `handlers` are by type of message, without `Drain`. The link counts
        in `counters["ignored"]`.
        """
        self._service, self._clock = service, clock
        self._own_address, self._hello = address, hello
        self._handlers = {**handlers, Drain: self._on_drain}
        self._outbox, self._counters = outbox, counters
        self._timeout_s = config.router_timeout_s
        self._interval_s = config.status_interval_s
        self.epoch = 0
        """The newest router epoch that was seen; 0 before the first one."""
        self._heard_at = clock()
        self._lost = True
        self._status_at = clock()
        self._status_seq = 0
        self._drain_at: float | None = None
        self._ends: list[End] = []
        self._stages: list[StageSeconds] = []

    @property
    def address(self) -> Address:
        return Address(ROUTER_ID, self.epoch)

    @property
    def draining(self) -> bool:
        return self._drain_at is not None

    def handle(self, envelope: Envelope) -> None:
        """Gives a message to its handler. Messages come in their sender's order; those for other epochs are dropped.
        Raises ProtocolError for a kind of message that this engine does not take.
        """
        if envelope.sender.replica_id == ROUTER_ID:
            if envelope.sender.epoch < self.epoch:
                self._counters["ignored"] += 1
                return
            self.meet(envelope.sender.epoch)
            self._heard_at, self._lost = self._clock(), False
        if envelope.receiver != self._own_address:
            self._counters["ignored"] += 1
            return
        handler = self._handlers.get(type(envelope.message))
        if handler is None:
            raise ProtocolError(f"{type(envelope.message).__name__} is no message for {self._own_address.replica_id}")
        handler(envelope)
        self.flush()

    def meet(self, router_epoch: int) -> None:
        """Takes note of a router epoch in a message. If it is newer than all before, every older key ends, and the new
        router gets a `Hello`.
        """
        if router_epoch <= self.epoch:
            return
        self.epoch, self._heard_at, self._lost = router_epoch, self._clock(), False
        self._ends.clear()
        self._stages.clear()
        self._service.end_all("router_gone")
        self._service.forget_peers()
        self._outbox.append((self.address, self._hello))

    def tick(self) -> None:
        """Looks at the router's silence (which ends all keys once), at the drain deadline and at the next status."""
        now = self._clock()
        if not self._lost and now - self._heard_at >= self._timeout_s:
            self._lost = True
            self._service.end_all("router_gone")
        if self._drain_at is not None and now >= self._drain_at:
            self._service.end_all("drain_deadline")
        self.flush()
        if self.epoch and now >= self._status_at:
            self._status_at = now + self._interval_s
            self._status_seq += 1
            self._outbox.append((self.address, self._service.status(self._status_seq)))
            if self._service.idle:
                self._service.check_idle()

    def end(
        self,
        key: RequestKey,
        request_number: int,
        kind: EndKind,
        *,
        finish_reason: FinishReason | None = None,
        error: str = "",
    ) -> None:
        """Adds the end of an attempt to the next `StepTokens`. Keys of an older router are ignored, since nobody would
        read of their ends.
        """
        if key.router_epoch == self.epoch:
            self._ends.append(End(request_number, key.attempt, kind, finish_reason, error))

    def stages(
        self, key: RequestKey, request_number: int, seconds: dict[str, float], num_cached_tokens: int | None = None
    ) -> None:
        """Adds the stage times of an attempt to the next `StepTokens`, and how many of its tokens the prefix cache had,
        if that is given.
        """
        if key.router_epoch == self.epoch:
            self._stages.append(StageSeconds(request_number, key.attempt, seconds, num_cached_tokens))

    def flush(self, rows: Rows | None = None) -> None:
        """Puts one `StepTokens` into the outbox if there is anything to say."""
        if not (self._ends or self._stages or (rows is not None and len(rows.request_numbers))):
            return
        if rows is None:
            rows = _NO_ROWS
        message = StepTokens(
            router_epoch=self.epoch,
            request_numbers=rows.request_numbers,
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

    def _on_drain(self, envelope: Envelope) -> None:
        """The engine drains. Its next status is due now, so that the router soon knows."""
        now = self._clock()
        self._drain_at, self._status_at = now + cast(Drain, envelope.message).deadline_s, now
