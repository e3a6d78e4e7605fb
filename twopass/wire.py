"""Converts between Python values and the messages of the contract: requests, answers and errors."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from twopass.connect import Place, hint
from twopass.errors import InvalidRequest, RequestError, ServerError, from_status
from twopass.proto import twopass_pb2 as pb
from twopass.proxy import proxy_of
from twopass.types import (
    Chunk,
    Completion,
    FinishReason,
    GenerateOptions,
    Loads,
    ModelInfo,
    ReplicaLoad,
    ServerInfo,
    Timing,
    TokenLogprobs,
    Usage,
)

M = TypeVar("M", bound=Message)

_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_REQUEST_FIELDS = ("priority", "cache_salt", "request_id")
"""Options that are fields of the request, not sampling parameters."""
_CALL_OPTIONS = ("timeout_s", "traceparent")
"""Options that are no part of the message."""


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token is not None else ()


def generate_request(
    prompt: str | None,
    prompt_token_ids: Iterable[int] | None,
    messages: Iterable[Mapping[str, str]] | None,
    options: GenerateOptions,
) -> pb.GenerateRequest:
    """Raises InvalidRequest unless exactly one prompt is given and every value fits its field."""
    if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
        raise InvalidRequest("prompt: exactly one of prompt and prompt_token_ids must be given", field="prompt")
    given = {name: value for name, value in options.items() if name not in _CALL_OPTIONS and value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    fields: dict[str, Any] = {name: given.pop(name) for name in _REQUEST_FIELDS if name in given}
    given |= _guided(given)
    fields["sampling"] = _build(pb.SamplingParams, given)
    if prompt is not None:
        fields["text"] = prompt
    elif prompt_token_ids is not None:
        fields["token_ids"] = _build(pb.TokenIds, {"ids": prompt_token_ids})
    else:
        fields["chat"] = _build(pb.Chat, {"messages": messages})
    return _build(pb.GenerateRequest, fields)


def _guided(given: Mapping[str, Any]) -> dict[str, Any]:
    """What form the answer is to have, as its field takes it. Raises InvalidRequest if several are given."""
    names = [name for name in given if name.startswith("guided_")]
    if len(names) > 1:
        raise InvalidRequest(f"{names[1]}: not together with {names[0]}", field=names[1])
    fields: dict[str, Any] = {}
    if isinstance(schema := given.get("guided_json"), Mapping):
        fields["guided_json"] = json.dumps(schema)
    if "guided_choice" in given:
        fields["guided_choice"] = _build(pb.GuidedChoice, {"choices": given["guided_choice"]})
    return fields


def tokenize_request(text: str | None, messages: Iterable[Mapping[str, str]] | None) -> pb.TokenizeRequest:
    """Raises InvalidRequest unless exactly one of `text` and `messages` is given."""
    if (text is None) == (messages is None):
        raise InvalidRequest("prompt: exactly one of text and messages must be given", field="prompt")
    return _build(
        pb.TokenizeRequest, {"text": text} if messages is None else {"chat": _build(pb.Chat, {"messages": messages})}
    )


def abort_request(request_id: str) -> pb.AbortRequest:
    return _build(pb.AbortRequest, {"request_id": request_id})


def _build(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Sets field by field, so that InvalidRequest names the one that is unknown, of a wrong type or out of range."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: {repr(value)[:64]} is not allowed: {error}", field=name) from error
    return message


def to_chunk(message: pb.GenerateResponse) -> Chunk:
    """Raises ServerError for a finish reason that this client does not know."""
    finish_reason = None
    if message.HasField("finish_reason"):
        finish_reason = _FINISH_REASONS.get(message.finish_reason)
        if finish_reason is None:
            raise ServerError(f"finish_reason {message.finish_reason} is not known to this client", status="OK")
    usage, timing = message.usage, message.timing
    return Chunk(
        text=message.text,
        token_ids=list(message.token_ids),
        prompt_tokens=message.prompt_tokens if message.HasField("prompt_tokens") else None,
        request_id=message.request_id if message.HasField("request_id") else None,
        finish_reason=finish_reason,
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if message.HasField("usage")
        else None,
        timing=Timing(timing.ttft_s, timing.total_s, dict(timing.stages), timing.attempts)
        if message.HasField("timing")
        else None,
        index=message.index,
        logprobs=[_to_logprobs(values) for values in message.logprobs] or None,
    )


def _to_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, dict(zip(message.top_token_ids, message.top_logprobs, strict=True)))


def join(chunks: list[Chunk]) -> list[Completion]:
    """Joins all chunks of a call to its answers, ordered by index. Raises ServerError if a part of one is missing."""
    usage, timing = (chunks[-1].usage, chunks[-1].timing) if chunks else (None, None)
    if usage is None or timing is None:
        raise incomplete()
    answers: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.index, []).append(chunk)
    return [_join_answer(answers[index], chunks[0].request_id or "", usage, timing) for index in sorted(answers)]


def _join_answer(chunks: list[Chunk], request_id: str, usage: Usage, timing: Timing) -> Completion:
    finish_reason = chunks[-1].finish_reason
    if finish_reason is None:
        raise incomplete()
    return Completion(
        request_id=request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        finish_reason=finish_reason,
        usage=usage,
        timing=timing,
        index=chunks[-1].index,
        logprobs=[values for chunk in chunks for values in chunk.logprobs or ()] or None,
    )


def single(completions: list[Completion]) -> Completion:
    """Returns the only answer. Raises InvalidRequest if there are several."""
    if len(completions) != 1:
        raise InvalidRequest(f"n: {len(completions)} is not allowed here: use read_all", field="n")
    return completions[0]


def require_single(options: GenerateOptions) -> None:
    """Raises InvalidRequest if the options ask for several answers."""
    count = options.get("n")
    if isinstance(count, int) and count > 1:
        raise InvalidRequest(f"n: {count} is not allowed here: use generate_texts or chat_texts", field="n")


def to_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(message.model, message.max_model_len, message.vocab_size, message.has_chat_template)


def to_server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        model=message.model,
        max_model_len=message.max_model_len,
        ready=message.ready,
        uptime_s=message.uptime_s,
        max_message_bytes=message.max_message_bytes,
        max_queue=message.max_queue,
    )


def to_loads(message: pb.GetLoadsResponse) -> Loads:
    return Loads(message.num_open, message.num_queued, [_to_replica_load(load) for load in message.replicas])


def _to_replica_load(message: pb.ReplicaLoad) -> ReplicaLoad:
    def reported(name: str) -> int | None:
        return getattr(message, name) if message.HasField(name) else None

    return ReplicaLoad(
        replica_id=message.replica_id,
        epoch=message.epoch,
        role=message.role,
        state=message.state,
        in_flight=message.in_flight,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        age_s=message.age_s,
        num_waiting=reported("num_waiting"),
        num_running=reported("num_running"),
        num_free_blocks=reported("num_free_blocks"),
        num_leases=reported("num_leases"),
        num_pulls=reported("num_pulls"),
        transport=message.transport,
        counters=dict(message.counters),
        num_scheduled_tokens=[dict(step.num_tokens) for step in message.num_scheduled_tokens],
    )


def incomplete() -> ServerError:
    return ServerError("the stream ended before the answer was complete", status="OK")


def to_error(call: Any, place: Place) -> RequestError:
    """Returns the error that an ended call stands for. `call`: the call or the error that it raised; both know status,
    details and trailing metadata. `place`: where it went.
    """
    metadata = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
    status, details = call.code().name, call.details() or ""
    if status == "UNAVAILABLE" and (proxy := proxy_of(place.target)):  # gRPC's words show only the proxy's IP address
        details += (
            f"; {place.target} is reached through a proxy, {proxy}: if it should not be, list the host in no_proxy"
        )
    if status == "UNAVAILABLE" and (meaning := hint(place, details)):
        details += f"; {meaning}"
    return from_status(status, details, metadata)
