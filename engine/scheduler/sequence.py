"""`Request`: what was asked of this engine. `Sequence`: its state in the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.scheduler.loops_blocks import BlockIds
from engine.scheduler.loops_hash import Chain
from protocol.arrays import Int32
from protocol.messages import EngineRequest, RequestKey, SamplingParams, TokenLogprobs

KVRole = Literal["local", "producer", "consumer"]
"""Whose KV: computed and used here; computed here for another engine; computed by another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt as the engine sees it.

    kv = "local": computed and continued here. "producer": computed here up to the first token, then its blocks are
    handed over (never scheduled past the prompt). "consumer": its KV arrives from elsewhere; it waits for an offer,
    reserves, arrives, decodes.
    """

    key: RequestKey
    request_number: int
    prompt_token_ids: Int32
    max_tokens: int
    sampling: SamplingParams
    kv: KVRole = "local"
    offset: int = 0
    """Index in the whole answer of the first token this engine produces."""
    priority: int = 0
    """Lower is more urgent."""
    arrival: float = 0.0
    """Orders waiting requests of equal priority; seconds or a counter, same unit for all."""
    cache_salt: str = ""

    @classmethod
    def from_message(cls, message: EngineRequest, *, kv: KVRole, arrival: float) -> "Request":
        """The engine's view of a dispatched attempt."""
        return cls(
            key=message.key,
            request_number=message.request_number,
            prompt_token_ids=message.prompt_token_ids,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            kv=kv,
            offset=message.offset,
            priority=message.priority,
            arrival=arrival,
            cache_salt=message.cache_salt,
        )


Stage = Literal["unoffered", "waiting", "reserved", "arrived", "running"]
QueueKey = tuple[float, float, int]
"""Total: the last of the three is a count."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one request in the scheduler. While it runs, its counts, tokens and blocks live in its row of the
    `SequenceTable`.

    unoffered: a consumer, nothing to reserve for yet · waiting: in the queue · reserved: owns blocks that KV is
    arriving in · arrived: all KV is there, a seat is not · running: in the table.
    """

    request: Request
    kv: KVRole
    """As the request says, until preemption turns a consumer into a local one."""
    stage: Stage
    limit: int
    """Known tokens at which the answer is complete: LENGTH."""
    queue_key: QueueKey = (0.0, 0.0, 0)
    """Place in the queue: lowest first."""
    tokens: Int32
    """Known tokens while it is not running."""
    chain: Chain
    """Up to the full blocks of its known tokens, as far as anybody needed them; while it is not running."""
    blocks: BlockIds = field(default_factory=lambda: BlockIds(np.zeros(0, np.int32)))
    """Blocks owned while reserved or arrived."""
    num_published: int = 0
    """Blocks from the front whose hash is in the prefix cache, while reserved."""
    num_cached: int = 0
    """Tokens of a consumer that were in this engine's prefix cache when it reserved."""
    first_token_id: int | None = None
    """First token of a consumer until it has been reported."""
    first_logprobs: TokenLogprobs | None = None
    num_first: int = 0
    """Known tokens when its first answer token is still to come: len(prompt)."""
    admitted: bool = False
    """Whether it was ever in the batch."""
    num_lost: int = 0
    """Tokens whose KV the last preemption threw away."""
    host_blocks: list[int] = field(default_factory=list)
    """Host blocks that hold the KV of its first `num_swapped` tokens while it waits after a preemption."""
    num_swapped: int = 0
    row: int = 0
    stop_token_ids: frozenset[int] = frozenset()
