"""Messages between router, prefill and decode engines. Ids and numbers only; frozen; keyword-only.

    R = router, P = prefill engine, D = decode engine

    EngineRequest  R -> P, D    start one attempt of a request
    AbortRequest     R -> P, D    end it
    KVHandoff        P -> D       blocks that are ready, under a lease
    KVRenew          D -> P       leases still wanted
    KVRelease        D -> P       the one answer to a lease
    KVRevoke         P -> D       the lease is to end
    StepTokens       P, D -> R    all tokens and ends of one engine step
    ReplicaStatus    P, D -> R    liveness and load, every second
    RouterStatus     R -> P, D    liveness and room, every second
    Hello            P, D -> R    an engine has started
    PeerUp           R -> D       a prefill engine's endpoint
    PeerDown         R -> D       a prefill engine is dead: its memory is to be let go of
    Drain            R -> P, D    take nothing new, be done by then
    PeerGap          P, D -> R    messages of this sender are missing for good

Sender, receiver and sequence number travel in the `Envelope`. Times are durations in seconds: no process reads
another's clock.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.arrays import Int32, Int64
from protocol.histogram import Distribution

ROUTER_ID = "router"

PoolName = Literal["prefill", "decode"]
"""What an engine is for."""
Role = Literal[PoolName, "colocated"]
"""What an engine is to do with one request."""
FinishReason = Literal["stop", "length"]
EndKind = Literal["finished", "aborted", "failed", "returned"]
AbortReason = Literal["client", "deadline", "superseded", "peer_lost"]


class Address(NamedTuple):
    """One life of one process: a replica that comes back has a higher epoch."""

    replica_id: str
    epoch: int


class RequestKey(NamedTuple):
    """One attempt of one request; dispatched once."""

    router_epoch: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends. Names and meaning follow vLLM; the defaults choose the likeliest
    token.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Only the so many likeliest tokens; 0 or -1: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Like `frequency_penalty` for tokens of the answer; `repetition_penalty` for those of the prompt too."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    min_tokens: int = 0
    """Tokens of the whole answer before which no end-of-sequence and no stop token is chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens are reported beside the chosen one; None: not even that one's."""
    seed: int | None = None
    """The router draws a missing one, so that every attempt of a request uses the same."""
    stop_token_ids: tuple[int, ...] = ()
    """End the answer, and are part of it. The model's end-of-sequence ids are added by the engine unless `ignore_eos`.
    """
    ignore_eos: bool = False


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters. `top`: likeliest
    first.
    """

    chosen: float
    top_token_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """R -> P and D: one attempt. `prompt_token_ids` = prompt + tokens already delivered (int32); `offset` counts the
    latter.
    """

    key: RequestKey
    request_number: int
    role: Role
    peer: Address | None
    prompt_token_ids: Int32
    offset: int
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    traceparent: str = ""
    """W3C trace context of the call; "": it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    key: RequestKey
    reason: AbortReason


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHandoff:
    """P -> D: `num_ready_tokens` of the prompt lie in `block_ids` (all of the prompt's, in order) under this lease.

    Cumulative; whole blocks unless `final`. The source stays readable until the lease word changes.
    """

    key: RequestKey
    lease_id: int
    lease_index: int
    lease_s: float
    block_ids: tuple[int, ...]
    num_ready_tokens: int
    final: bool
    first_token_id: int | None
    layout_fingerprint: bytes
    first_logprobs: TokenLogprobs | None = None
    """Of the first token, if the request asked: decode repeats both."""
    checksums: tuple[int, ...] = ()
    """Of the blocks that are ready, in the order of `block_ids`; empty unless `transfer.checksum` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRenew:
    leases: tuple[tuple[RequestKey, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRelease:
    """D -> P, once per lease. `num_bytes` and `seconds`: what the pulls moved and how long they took.

    `router_knows`, of a refusal: the attempt's end came from the router, or D has told it. False: D has no request
    to speak of, so P tells the router.
    """

    key: RequestKey
    lease_id: int
    outcome: Literal["consumed", "refused"]
    reason: str = ""
    router_knows: bool = True
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRevoke:
    key: RequestKey
    lease_id: int
    reason: str


class End(NamedTuple):
    """The end of one attempt, beside the arrays of `StepTokens`."""

    request_number: int
    attempt: int
    kind: EndKind
    finish_reason: FinishReason | None = None
    error: str = ""


class StageSeconds(NamedTuple):
    """Seconds one attempt spent in each stage of this engine: sent with its first token and with its end.

    `num_cached_tokens`: how much of its known tokens the engine that computes them had in its prefix cache when the
    attempt began. None: not told here.
    """

    request_number: int
    attempt: int
    seconds: dict[str, float]
    num_cached_tokens: int | None = None


class Logprobs(NamedTuple):
    """Of the token with index `offset` in the whole answer."""

    request_number: int
    attempt: int
    offset: int
    values: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """P, D -> R: one row per request that got tokens in this step (or ended).

    `request_numbers`, `attempts`, `offsets`, `counts`: [num_rows]; row i owns the next `counts[i]` entries of
    `token_ids` and its first token has index `offsets[i]` in the whole answer. `ends` may name requests
    without a row. `logprobs`: of every token of the requests that asked.
    """

    router_epoch: int
    request_numbers: Int64
    attempts: Int32
    offsets: Int32
    counts: Int32
    token_ids: Int32
    ends: tuple[End, ...] = ()
    stages: tuple[StageSeconds, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """P, D -> R: liveness and load only; no request changes state because of a number in here.

    `counters` and `distributions` are cumulative within the epoch; of the free blocks `num_cached_blocks` hold content
    that can be hit, `num_held_blocks` are neither free nor owned: a step in flight may touch them. `thrash_ratio`:
    tokens computed again after preemptions per token generated, over the engine's window. `transport`: how KV comes
    here, "" where none does. `hashes_added`/`hashes_removed`: prefix-cache changes since the status before.
    """

    state: Literal["up", "draining"]
    seq: int
    num_waiting: int
    num_running: int
    num_leases: int
    num_pulls: int
    num_early_handoffs: int
    num_free_blocks: int
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    thrash_ratio: float = 0.0
    transport: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)
    num_scheduled_tokens: tuple[dict[str, int], ...] = ()
    hashes_added: tuple[bytes, ...] = ()
    hashes_removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """`prefill_room_blocks`, `prefill_max_tokens`: most free blocks in a prefill engine, and most known tokens that one
    can take.
    """

    router_epoch: int
    seq: int
    prefill_room_blocks: int
    prefill_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An engine has started. `endpoint`: opaque to everyone but its peers' transport.

    `max_prompt_tokens`: longest prompt it computes from the beginning. An answer that goes on elsewhere brings more
    known tokens: the engine takes as many as its blocks and `max_model_len` hold.
    """

    role: PoolName
    layout_fingerprint: bytes
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_prompt_tokens: int
    endpoint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp:
    peer: Address
    endpoint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDown:
    """`peer` is dead. While its cache is mapped somewhere its device memory stays allocated, and the successor on the
    same device may not fit.
    """

    peer: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGap:
    """Messages from `peer` are missing for longer than `gap_timeout_s`: it, or the way from it, is dead."""

    peer: Address


Message = (
    EngineRequest
    | AbortRequest
    | KVHandoff
    | KVRenew
    | KVRelease
    | KVRevoke
    | StepTokens
    | ReplicaStatus
    | RouterStatus
    | Hello
    | PeerUp
    | PeerDown
    | Drain
    | PeerGap
)


class Envelope(NamedTuple):
    """A message on its way. `seq` counts from 0 per (sender, receiver) pair of addresses."""

    sender: Address
    receiver: Address
    seq: int
    message: Message
