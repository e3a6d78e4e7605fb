"""Messages between router, prefill and decode engines. They hold ids and numbers only, are frozen and keyword-only.

    R = router, P = prefill engine, D = decode engine

    EngineRequest    R -> P, D    start one attempt of a request
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

The file is longer than 300 lines because it is the whole vocabulary, from which tables of docs/handoff.md are written.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.arrays import Int32, Int64
from protocol.grammar import Grammar
from protocol.histogram import Distribution

ROUTER_ID = "router"

PoolName = Literal["prefill", "decode"]
"""What an engine is for."""
Role = Literal[PoolName, "colocated"]
"""What an engine is to do with one request."""
FinishReason = Literal["stop", "length"]
EndKind = Literal["finished", "aborted", "failed", "returned", "invalid"]
"""invalid: no other attempt could end better, since the request itself asks for what cannot be done."""
AbortReason = Literal["client", "deadline", "superseded", "peer_lost"]


class Address(NamedTuple):
    """One life of one process. A replica that comes back has a higher epoch."""

    replica_id: str
    epoch: int


class RequestKey(NamedTuple):
    """One attempt of one request. A key is dispatched once."""

    router_epoch: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends. Names and meanings follow vLLM; the defaults choose the
    likeliest token.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Only this many of the likeliest tokens can be chosen; with 0 or -1, all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Applies to tokens of the answer, like `frequency_penalty`; `repetition_penalty` applies to the prompt's too."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit) pairs."""
    min_tokens: int = 0
    """Length of the whole answer before which no end-of-sequence token and no stop token is chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens are reported beside the chosen one; with None, not even the chosen one is."""
    seed: int | None = None
    """The router draws a missing seed, so that every attempt of a request uses the same."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer and are part of it. The engine adds the model's end-of-sequence ids unless
    `ignore_eos` is set.
    """
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Only tokens that it allows are chosen; where nothing may follow, an end-of-sequence token alone."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters; under a grammar
    they are shared among the tokens that it allows. `top` and `top_token_ids` list the likeliest tokens, likeliest
    first.
    """

    chosen: float
    top_token_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """R -> P and D: start one attempt. `prompt_token_ids` (int32) are the prompt and the `offset` tokens that were
    already delivered.
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
    """W3C trace context of the call; "" if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    key: RequestKey
    reason: AbortReason


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHandoff:
    """P -> D: the KV of `num_ready_tokens` tokens of the prompt is in `block_ids` (all blocks of the prompt, in order)
    under this lease.

    The number is cumulative, and stands for whole blocks unless `final`. The source stays readable until the
    lease word changes.
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
    """Log probabilities of the first token, if the request asked. Decode repeats both."""
    checksums: tuple[int, ...] = ()
    """Checksums of the blocks that are ready, in the order of `block_ids`; empty unless `transfer.checksum` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRenew:
    leases: tuple[tuple[RequestKey, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRelease:
    """D -> P, once per lease: D has all KV, or wants none. The pulls moved `num_bytes` and took `seconds`.

    `router_knows` is for refusals. True: the end of the attempt came from the router, or D has told the router of it.
    False: D has no request to tell of, so P tells the router.
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
    """Seconds that one attempt spent in each stage of this engine. They are sent with its first token and with its end.

    `num_cached_tokens` of its known tokens were in the prefix cache of the engine that computes them when the attempt
    began; None where that is not told.
    """

    request_number: int
    attempt: int
    seconds: dict[str, float]
    num_cached_tokens: int | None = None


class Logprobs(NamedTuple):
    """Log probabilities of the token with index `offset` in the whole answer."""

    request_number: int
    attempt: int
    offset: int
    values: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """P, D -> R: one row per request that got tokens in this step, and the attempts that ended.

    `request_numbers`, `attempts`, `offsets` and `counts` are [num_rows]. Row i owns the next `counts[i]` entries of
    `token_ids`, and its first token has index `offsets[i]` in the whole answer. `ends` may name requests without a row.
    `logprobs` has every token of the requests that asked.
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
    """P, D -> R: liveness and load only. No request changes its state because of a number in here.

    `counters` and `distributions` are cumulative within the epoch. `num_cached_blocks` of the free blocks hold content
    that can be hit; `num_held_blocks` are neither free nor owned, since a step in flight may touch them.
    `thrash_ratio` is tokens computed again after preemptions per token generated, over the engine's window.
    `transport` is how KV comes here, "" where none does. `hashes_added` and `hashes_removed` are changes of the prefix
    cache since the last status.
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
    """R -> P, D: liveness and room. `prefill_room_blocks` is the largest number of free blocks in a prefill engine,
    `prefill_max_tokens` the largest number of known tokens that one can take.
    """

    router_epoch: int
    seq: int
    prefill_room_blocks: int
    prefill_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """P, D -> R: an engine has started. `endpoint` has a meaning only for the transport of its peers.

    `max_prompt_tokens` is the longest prompt that it computes from the beginning. An answer that goes on here after it
    began elsewhere brings more known tokens: the engine takes as many as its blocks and `max_model_len` hold.
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
    """P, D -> R: a message from `peer` has been missing for longer than `gap_timeout_s`. The peer, or the way
    from it, is dead.
    """

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
    """A message on its way. `seq` counts from 0 for each (sender, receiver) pair of addresses."""

    sender: Address
    receiver: Address
    seq: int
    message: Message
