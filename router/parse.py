"""A client's message becomes a request, or an InvalidRequest that names field, value and limit."""

import re
import uuid
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from protocol.errors import InvalidRequest
from protocol.messages import Int32, SamplingParams
from router.admission import ClientRequest
from router.tokenizer import Tokenizer
from twopass.proto import twopass_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256

GREEDY: dict[str, tuple[float, ...]] = {
    "temperature": (0.0,),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logprobs": (),
    "n": (1,),
}
"""Per field of SamplingParams the values that leave greedy decoding as it is; only these are served."""

M = TypeVar("M", bound=Message)


class Parsed(NamedTuple):
    request: ClientRequest
    stop: tuple[str, ...]
    """Stop strings: the router's own business, engines know tokens only."""


def parse_bytes(kind: Callable[[], M], data: bytes, max_message_bytes: int) -> M:
    """Raises InvalidRequest for a message that is too large, damaged, or holds text that is no UTF-8."""
    if len(data) > max_message_bytes:
        raise InvalidRequest("message", f"{len(data)} bytes", f"at most {max_message_bytes} bytes (max_message_bytes)")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest("message", f"{len(data)} bytes", f"no {message.DESCRIPTOR.full_name} in valid UTF-8") from error
    return message


def parse_generate(
    message: pb.GenerateRequest, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, deadline_s: float | None
) -> Parsed:
    """Validates and tokenises. Slow for long texts: not for an event loop. Raises InvalidRequest."""
    sampling = message.sampling
    _require_greedy(sampling)
    request = ClientRequest(
        request_id=_request_id(message),
        prompt_token_ids=_prompt_token_ids(message, tokenizer, vocab_size, max_model_len),
        max_tokens=_max_tokens(sampling),
        sampling=SamplingParams(
            seed=sampling.seed if sampling.HasField("seed") else None,
            stop_token_ids=_stop_token_ids(sampling, vocab_size),
            ignore_eos=sampling.ignore_eos,
        ),
        priority=message.priority,
        deadline_s=deadline_s,
        cache_salt=_cache_salt(message),
    )
    return Parsed(request, _stop_strings(sampling))


def parse_tokenize(message: pb.TokenizeRequest, tokenizer: Tokenizer) -> Int32:
    """Token ids of the prompt. Slow for long texts: not for an event loop. Raises InvalidRequest."""
    if message.WhichOneof("prompt") is None:
        raise InvalidRequest("prompt", "nothing", "one of text and chat must be set")
    return tokenizer.encode(message.text) if message.HasField("text") else _chat_token_ids(message.chat, tokenizer)


def _require_greedy(sampling: pb.SamplingParams) -> None:
    for name, allowed in GREEDY.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value not in allowed:
            rule = " or ".join(f"{number:g}" for number in allowed) or "unset"
            raise InvalidRequest(name, value, f"this version decodes greedily and serves only {rule}")


def _request_id(message: pb.GenerateRequest) -> str:
    if not message.HasField("request_id"):
        return uuid.uuid4().hex
    if re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}", message.request_id) is None:
        raise InvalidRequest("request_id", repr(message.request_id[:32]), f"1 to {MAX_ID_CHARACTERS} printable ASCII characters, no space")
    return message.request_id


def _prompt_token_ids(message: pb.GenerateRequest, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> Int32:
    match message.WhichOneof("prompt"):
        case "text":
            token_ids = tokenizer.encode(message.text)
        case "token_ids":
            ids = message.token_ids.ids
            _require_length(len(ids), max_model_len)  # before the copy, which costs
            token_ids = np.array(ids, dtype=np.int32)
        case "chat":
            token_ids = _chat_token_ids(message.chat, tokenizer)
        case _:
            raise InvalidRequest("prompt", "nothing", "one of text, token_ids and chat must be set")
    _require_length(len(token_ids), max_model_len)
    _require_in_vocabulary("token_ids", token_ids, vocab_size)
    return token_ids


def _chat_token_ids(chat: pb.Chat, tokenizer: Tokenizer) -> Int32:
    if not chat.messages:
        raise InvalidRequest("chat", "0 messages", "at least 1 message")
    for i, turn in enumerate(chat.messages):
        if not turn.role:
            raise InvalidRequest(f"chat.messages[{i}].role", "''", "must not be empty")
    return tokenizer.apply_chat_template([{"role": turn.role, "content": turn.content} for turn in chat.messages])


def _max_tokens(sampling: pb.SamplingParams) -> int | None:
    if not sampling.HasField("max_tokens"):
        return None
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens", sampling.max_tokens, "at least 1")
    return sampling.max_tokens


def _stop_token_ids(sampling: pb.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(sampling.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    _require_in_vocabulary("stop_token_ids", np.array(sampling.stop_token_ids, dtype=np.int32), vocab_size)
    return tuple(sampling.stop_token_ids)


def _stop_strings(sampling: pb.SamplingParams) -> tuple[str, ...]:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(sampling.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in sampling.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(sampling.stop)


def _cache_salt(message: pb.GenerateRequest) -> str:
    if len(message.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest("cache_salt", f"{len(message.cache_salt)} characters", f"at most {MAX_SALT_CHARACTERS}")
    return message.cache_salt


def _require_length(num_tokens: int, max_model_len: int) -> None:
    """`max_model_len` 0: no engine has said yet."""
    if num_tokens == 0:
        raise InvalidRequest("prompt", "0 tokens", "at least 1 token")
    if max_model_len and num_tokens >= max_model_len:
        raise InvalidRequest("prompt", f"{num_tokens} tokens", f"at most {max_model_len - 1} (max_model_len - 1)")


def _require_in_vocabulary(field: str, token_ids: Int32, vocab_size: int) -> None:
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise InvalidRequest(f"{field}[{index}]", int(token_ids[index]), f"token ids are 0 to {vocab_size - 1}")
