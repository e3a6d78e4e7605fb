"""What calls to a server take and return, as plain Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating call. Names and meaning follow vLLM; the server chooses what is absent."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    """How many of the likeliest tokens are reported beside each chosen one; 0 reports the chosen one alone."""
    n: int
    """How many answers to the same prompt are wanted; `Chunk.index` tells them apart."""
    logit_bias: Mapping[int, float]
    include_stop_str_in_output: bool
    guided_json: str | Mapping[str, Any]
    """A JSON schema that the answer follows; at most one of the four `guided` options may be given."""
    guided_json_object: bool
    guided_regex: str
    guided_choice: Sequence[str]
    priority: int
    """Requests of lower priority are served first."""
    cache_salt: str
    request_id: str
    timeout_s: float
    """Seconds until the request's deadline; replaces the client's own `timeout_s`."""
    traceparent: str
    """W3C trace context of the caller's span; the server's spans become its children."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. `cached_tokens`: tokens of the prompt that were taken from a prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the server, from the arrival of the call. The `stages` add up to `total_s`; if there are several
    answers, they are those of the last one to end.
    """

    ttft_s: float
    total_s: float
    stages: Mapping[str, float]
    attempts: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters; with
    a `guided` option they are shared among the tokens that it allows. `top` holds the
    likeliest tokens, likeliest first.
    """

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. Its text may lag behind its tokens: it never ends inside a character or inside what may
    become a stop string.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int | None = None
    """Set in the call's first chunk only, like `request_id`."""
    request_id: str | None = None
    finish_reason: FinishReason | None = None
    """Set in each answer's last chunk only."""
    usage: Usage | None = None
    """Set in the call's last chunk only, like `timing`; it covers all answers."""
    timing: Timing | None = None
    index: int = 0
    """The answer's index among the `n` answers."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token id; None unless the request asked for logprobs."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `usage` and `timing` are the call's: the same for all of its answers."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served. `max_model_len`: tokens that a prompt and its answer may have together."""

    model: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What runs on the server. `ready` is False before its engines are up and while it drains."""

    version: str
    model: str
    max_model_len: int
    ready: bool
    uptime_s: float
    max_message_bytes: int
    max_queue: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy one engine is. Fields from `num_waiting` on are as of its last report, `age_s` seconds ago. Those that
    may be None are None before the first report.
    """

    replica_id: str
    epoch: int
    role: str
    state: str
    in_flight: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    age_s: float
    num_waiting: int | None
    num_running: int | None
    num_free_blocks: int | None
    num_leases: int | None
    num_pulls: int | None
    transport: str
    counters: Mapping[str, float]
    num_scheduled_tokens: list[dict[str, int]]
    """The number of tokens that each of the latest steps computed, by request id; the oldest step is first."""


@dataclass(frozen=True, slots=True)
class Loads:
    """How busy the deployment is. `num_open`: accepted answers that have not ended. `num_queued`: how many of them wait
    for an engine.
    """

    num_open: int
    num_queued: int
    replicas: list[ReplicaLoad]
