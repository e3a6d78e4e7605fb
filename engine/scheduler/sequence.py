"""`Request` is what was asked of this engine; `Sequence` is its state in the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.scheduler.loops_blocks import BlockIds
from engine.scheduler.loops_hash import Chain
from protocol.arrays import Int32
from protocol.block_hash import root_hash, to_rows
from protocol.messages import EngineRequest, RequestKey, SamplingParams, TokenLogprobs

KVRole = Literal["local", "producer", "consumer"]
"""Who computes the KV and who uses it: "local", both here; "producer", computed here for another engine; "consumer",
computed by another engine and used here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt as the engine sees it.

    A "local" request is computed and continued here. A "producer" is computed here up to its first token and never
    scheduled past the prompt; then its blocks are handed over. The KV of a "consumer" comes from elsewhere: it waits
    for an offer, reserves, arrives and decodes.
    """

    key: RequestKey
    request_number: int
    prompt_token_ids: Int32
    max_tokens: int
    sampling: SamplingParams
    kv: KVRole = "local"
    offset: int = 0
    """Index in the whole answer of the first token that this engine produces."""
    priority: int = 0
    """Lower is more urgent."""
    arrival: float = 0.0
    """Orders waiting requests of equal priority: seconds or a counter, in the same unit for all requests."""
    cache_salt: str = ""

    @classmethod
    def from_message(cls, message: EngineRequest, *, kv: KVRole, arrival: float) -> "Request":
        """The attempt that a message dispatches."""
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
"""Keys have a total order, because the last of the three numbers is a count."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one request in the scheduler. While it runs, its counts, tokens and blocks live in its row of
    the `SequenceTable`.

    Its stages: "unoffered", a consumer that has nothing to reserve for yet; "waiting", in the queue;
    "reserved", it owns blocks in which KV is arriving; "arrived", all its KV is there and it waits for a seat;
    "running", in the table.
    """

    request: Request
    kv: KVRole
    """What the request says, until a preemption turns a consumer into a local sequence."""
    stage: Stage
    limit: int
    """Number of known tokens at which the answer is complete by its length."""
    queue_key: QueueKey = (0.0, 0.0, 0)
    """Place in the queue; the lowest key comes first."""
    tokens: Int32
    """Known tokens, while it is not running."""
    chain: Chain
    """Hashes of the full blocks of its known tokens, as far as they were needed so far; while it is not running."""
    blocks: BlockIds = field(default_factory=lambda: BlockIds(np.zeros(0, np.int32)))
    """Blocks that it owns while it is reserved or arrived."""
    num_published: int = 0
    """How many of its first blocks are in the prefix cache, while it is reserved."""
    num_cached: int = 0
    """Tokens of a consumer that were in this engine's prefix cache when it reserved."""
    first_token_id: int | None = None
    """First token of a consumer, until it has been reported."""
    first_logprobs: TokenLogprobs | None = None
    num_first: int = 0
    """Number of known tokens before its first answer token: len(prompt)."""
    admitted: bool = False
    """True once it has been in a batch."""
    num_lost: int = 0
    """Tokens whose KV the last preemption threw away."""
    host_blocks: list[int] = field(default_factory=list)
    """Host blocks that hold the KV of its first `num_swapped` tokens while it waits after a preemption."""
    num_swapped: int = 0
    row: int = 0
    """Its row of the table while it runs."""
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, request: Request, *, fingerprint: bytes, max_model_len: int) -> "Sequence":
        """A sequence that knows its prompt alone. `fingerprint` names the model in block hashes."""
        num_prompt = len(request.prompt_token_ids)
        limit = num_prompt + request.max_tokens
        return cls(
            request=request,
            kv=request.kv,
            stage="unoffered",
            # The engine that writes an answer decides how long it may grow, not the engine that begins it.
            limit=limit if request.kv == "producer" else min(limit, max_model_len),
            chain=Chain(to_rows([root_hash(fingerprint, request.cache_salt)])),
            tokens=np.array(request.prompt_token_ids, np.int32),  # a copy: the loops take no read-only array
            num_first=num_prompt,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
        )
