"""Turns a client's message into requests, or raises an InvalidRequest that names field, value and limit."""

import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from protocol.arrays import Int32
from protocol.errors import InvalidRequest
from protocol.messages import SamplingParams
from router.admission import ClientRequest
from router.tokenizer import Tokenizer
from twopass.proto import twopass_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256
MAX_CHAT_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_N = 64

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_N),
}
"""The least and the greatest value of fields of SamplingParams, both included."""
BIAS_RANGE = (-100.0, 100.0)
"""The least and the greatest value that may be added to a logit, both included."""

M = TypeVar("M", bound=Message)


class Parsed(NamedTuple):
    """What one call asks for. Engines get the requests; stop strings are the router's business."""

    request_id: str
    requests: list[ClientRequest]
    """One request for each of the `n` answers. They differ in id and seed only."""
    stop: tuple[str, ...]
    include_stop: bool
    """Whether the text ends after the stop string instead of before it."""


def parse_bytes(kind: Callable[[], M], data: bytes, max_message_bytes: int) -> M:
    """Raises InvalidRequest for a message that is too large or damaged, or whose text is not UTF-8."""
    if len(data) > max_message_bytes:
        raise InvalidRequest("message", f"{len(data)} bytes", f"at most {max_message_bytes} bytes (max_message_bytes)")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            "message", f"{len(data)} bytes", f"no {message.DESCRIPTOR.full_name} in valid UTF-8"
        ) from error
    return message


def parse_generate(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_model_len: int,
    deadline_s: float | None,
    traceparent: str = "",
) -> Parsed:
    """Validates and tokenises a request; the cheap checks come first. Raises InvalidRequest. It is slow for long texts,
    so it must not run on an event loop.
    """
    params = message.sampling
    request_id, max_tokens, cache_salt = _request_id(message), _max_tokens(params), _cache_salt(message)
    stop, sampling, count = _stop_strings(params), _sampling(params, vocab_size), _count(params)
    request = ClientRequest(
        request_id=request_id,
        prompt_token_ids=_prompt_token_ids(message, tokenizer, vocab_size, max_model_len),
        max_tokens=max_tokens,
        sampling=sampling,
        priority=message.priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        traceparent=traceparent,
    )
    requests = [request] if count == 1 else [_numbered(request, index) for index in range(count)]
    return Parsed(request_id, requests, stop, params.include_stop_str_in_output)


def num_asked(message: pb.GenerateRequest) -> int:
    """Returns how many answers a message asks for, which may be invalid. An `n` out of range counts as 1."""
    return message.sampling.n if 1 <= message.sampling.n <= MAX_N else 1


def parse_tokenize(message: pb.TokenizeRequest, tokenizer: Tokenizer) -> Int32:
    """Returns the prompt's token ids. Raises InvalidRequest. It is as slow as `parse_generate`."""
    if message.WhichOneof("prompt") is None:
        raise InvalidRequest("prompt", "nothing", "one of text and chat must be set")
    if message.HasField("text"):
        return tokenizer.encode(message.text)
    return tokenizer.encode_chat(_render(message.chat, tokenizer))


def parse_abort(message: pb.AbortRequest) -> str:
    """Returns the id of the request to abort. Raises InvalidRequest."""
    return _checked_id(message.request_id)


def _numbered(request: ClientRequest, index: int) -> ClientRequest:
    """Returns the request for answer `index` of several. Clients cannot choose its id, because it has a space in it."""
    seed = request.sampling.seed
    sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
    return replace(request, request_id=f"{request.request_id} {index}", sampling=sampling)


def _sampling(params: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    for name, (least, greatest) in RANGES.items():
        value = getattr(params, name)
        if params.HasField(name) and not least <= value <= greatest:  # NaN is outside, too
            raise InvalidRequest(name, value, f"{least:g} to {greatest:g}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise InvalidRequest("top_p", params.top_p, "above 0, at most 1")
    if params.top_k < -1:
        raise InvalidRequest("top_k", params.top_k, "at least 1, or 0 or -1 for all tokens")
    if params.min_tokens < 0:
        raise InvalidRequest("min_tokens", params.min_tokens, "at least 0")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        logit_bias=_logit_bias(params, vocab_size),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=_stop_token_ids(params, vocab_size),
        ignore_eos=params.ignore_eos,
    )


def _count(params: pb.SamplingParams) -> int:
    """Returns how many answers are asked for. `_sampling` has checked the range of `n`."""
    if params.n > 1 and params.temperature == 0:
        raise InvalidRequest("n", params.n, "1 without a temperature: all answers would be the same")
    return params.n or 1


def _request_id(message: pb.GenerateRequest) -> str:
    return _checked_id(message.request_id) if message.HasField("request_id") else uuid.uuid4().hex


def _checked_id(request_id: str) -> str:
    if re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}", request_id) is None:
        raise InvalidRequest(
            "request_id", repr(request_id[:32]), f"1 to {MAX_ID_CHARACTERS} printable ASCII characters, no space"
        )
    return request_id


def _prompt_token_ids(message: pb.GenerateRequest, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> Int32:
    match message.WhichOneof("prompt"):
        case "text":
            _require_room("text", message.text, tokenizer, max_model_len)
            token_ids = tokenizer.encode(message.text)
        case "token_ids":
            ids = message.token_ids.ids
            _require_length(len(ids), max_model_len)  # refused before the copy, which is slow
            token_ids = np.array(ids, dtype=np.int32)
        case "chat":
            text = _render(message.chat, tokenizer)
            _require_room("chat", text, tokenizer, max_model_len)
            token_ids = tokenizer.encode_chat(text)
        case _:
            raise InvalidRequest("prompt", "nothing", "one of text, token_ids and chat must be set")
    _require_length(len(token_ids), max_model_len)
    _require_in_vocabulary("token_ids", token_ids, vocab_size)
    return token_ids


def _render(chat: pb.Chat, tokenizer: Tokenizer) -> str:
    if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat", f"{len(chat.messages)} messages", f"1 to {MAX_CHAT_MESSAGES} messages")
    for i, turn in enumerate(chat.messages):
        if not turn.role:
            raise InvalidRequest(f"chat.messages[{i}].role", "''", "must not be empty")
    return tokenizer.render([{"role": turn.role, "content": turn.content} for turn in chat.messages])


def _max_tokens(params: pb.SamplingParams) -> int | None:
    if not params.HasField("max_tokens"):
        return None
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens", params.max_tokens, "at least 1")
    return params.max_tokens


def _stop_token_ids(params: pb.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(params.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    _require_in_vocabulary("stop_token_ids", np.array(params.stop_token_ids, dtype=np.int32), vocab_size)
    return tuple(params.stop_token_ids)


def _logit_bias(params: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(params.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest("logit_bias", f"{len(params.logit_bias)} tokens", f"at most {MAX_BIASED_TOKENS}")
    least, greatest = BIAS_RANGE
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("logit_bias", f"token {token_id}", f"token ids are 0 to {vocab_size - 1}")
        if not least <= bias <= greatest:
            raise InvalidRequest(f"logit_bias[{token_id}]", bias, f"{least:g} to {greatest:g}")
    return tuple(sorted(params.logit_bias.items()))


def _stop_strings(params: pb.SamplingParams) -> tuple[str, ...]:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(params.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_CHARACTERS} characters"
            )
    return tuple(params.stop)


def _cache_salt(message: pb.GenerateRequest) -> str:
    if len(message.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest("cache_salt", f"{len(message.cache_salt)} characters", f"at most {MAX_SALT_CHARACTERS}")
    return message.cache_salt


def _require_room(field: str, text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses a text that cannot fit however few tokens it has. Tokenising it first would take about 1 us per byte."""
    if max_model_len and (least := tokenizer.least_tokens(text)) >= max_model_len:
        raise InvalidRequest(field, f"at least {least} tokens", f"at most {max_model_len - 1} (max_model_len - 1)")


def _require_length(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequest. `max_model_len` is 0 while no engine has reported it; then nothing is too long."""
    if num_tokens == 0:
        raise InvalidRequest("prompt", "0 tokens", "at least 1 token")
    if max_model_len and num_tokens >= max_model_len:
        raise InvalidRequest("prompt", f"{num_tokens} tokens", f"at most {max_model_len - 1} (max_model_len - 1)")


def _require_in_vocabulary(field: str, token_ids: Int32, vocab_size: int) -> None:
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise InvalidRequest(f"{field}[{index}]", int(token_ids[index]), f"token ids are 0 to {vocab_size - 1}")
