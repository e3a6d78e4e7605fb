"""Between the client's Python and the messages of the contract: options and prompts in, chunks, completions and errors out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.message import Message

from twopass.errors import InvalidRequest, RequestError, ServerError, from_status
from twopass.proto import twopass_pb2 as pb

FinishReason = Literal["stop", "length"]
M = TypeVar("M", bound=Message)

_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_REQUEST_FIELDS = ("priority", "cache_salt", "request_id")
"""Options that are no sampling parameters."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating call; names and meaning follow vLLM. Absent: the server's default."""

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
    n: int
    priority: int
    """Lower is served first."""
    cache_salt: str
    request_id: str
    timeout_s: float
    """The request's deadline; instead of the client's own."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, taken from a prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the server, from the arrival of the call; `stages` add up to `total_s`."""

    ttft_s: float
    total_s: float
    stages: Mapping[str, float]
    attempts: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. `text` may lag behind `token_ids`: a piece never ends inside a character or a possible stop string."""

    text: str
    token_ids: list[int]
    prompt_tokens: int | None = None
    """First chunk only, like `request_id`."""
    request_id: str | None = None
    finish_reason: FinishReason | None = None
    """Last chunk only, like `usage` and `timing`."""
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


def generate_request(
    prompt: str | None,
    prompt_token_ids: Iterable[int] | None,
    messages: Iterable[Mapping[str, str]] | None,
    options: GenerateOptions,
) -> pb.GenerateRequest:
    if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
        raise InvalidRequest("prompt: exactly one of prompt and prompt_token_ids must be given", field="prompt")
    given = {name: value for name, value in options.items() if name != "timeout_s" and value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    fields: dict[str, Any] = {name: given.pop(name) for name in _REQUEST_FIELDS if name in given}
    fields["sampling"] = _build(pb.SamplingParams, given)
    if prompt is not None:
        fields["text"] = prompt
    elif prompt_token_ids is not None:
        fields["token_ids"] = _build(pb.TokenIds, {"ids": prompt_token_ids})
    else:
        fields["chat"] = _build(pb.Chat, {"messages": messages})
    return _build(pb.GenerateRequest, fields)


def tokenize_request(text: str | None, messages: Iterable[Mapping[str, str]] | None) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise InvalidRequest("prompt: exactly one of text and messages must be given", field="prompt")
    return _build(pb.TokenizeRequest, {"text": text} if messages is None else {"chat": _build(pb.Chat, {"messages": messages})})


def _build(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Field by field, so that a wrong type, an unknown name or a number out of range is refused by name."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: {repr(value)[:64]} is not allowed: {error}", field=name) from error
    return message


def to_chunk(message: pb.GenerateResponse) -> Chunk:
    chunk_ids = list(message.token_ids)
    prompt_tokens = message.prompt_tokens if message.HasField("prompt_tokens") else None
    request_id = message.request_id if message.HasField("request_id") else None
    if not message.HasField("finish_reason"):
        return Chunk(message.text, chunk_ids, prompt_tokens, request_id)
    finish_reason = _FINISH_REASONS.get(message.finish_reason)
    if finish_reason is None:
        raise ServerError(f"finish_reason {message.finish_reason} is not known to this client", status="OK")
    usage, timing = message.usage, message.timing
    return Chunk(
        text=message.text,
        token_ids=chunk_ids,
        prompt_tokens=prompt_tokens,
        request_id=request_id,
        finish_reason=finish_reason,
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        timing=Timing(timing.ttft_s, timing.total_s, dict(timing.stages), timing.attempts),
    )


def join(chunks: list[Chunk]) -> Completion:
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None or last.usage is None or last.timing is None:
        raise incomplete()
    return Completion(
        request_id=chunks[0].request_id or "",
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        finish_reason=last.finish_reason,
        usage=last.usage,
        timing=last.timing,
    )


def to_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(message.model, message.max_model_len, message.vocab_size, message.has_chat_template)


def incomplete() -> ServerError:
    return ServerError("the stream ended before the answer was complete", status="OK")


def to_error(call: Any) -> RequestError:
    """`call`: an ended call or the error it raised; both know status, details and trailing metadata."""
    metadata = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
    return from_status(call.code().name, call.details() or "", metadata)
