"""Validates what a call asks for and turns it into requests, or raises an InvalidRequest that names field, value and
limit. Every door's dialect comes through here.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32
from protocol.errors import InvalidRequest
from protocol.grammar import MAX_GRAMMAR_BYTES, Grammar
from protocol.messages import SamplingParams
from router.admission import Account, ClientRequest
from router.call_request import CallRequest, ChatTurn, Prompt, SamplingOptions
from router.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256
MAX_CHAT_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_N = 64
MAX_SHOWN_CHARACTERS = 64
"""Of a grammar's text, in an error."""
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1

RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_INT32),
    "temperature": (0, 100),
    "min_p": (0, 1),
    "seed": (-MAX_INT64 - 1, MAX_INT64),
    "min_tokens": (0, MAX_INT32),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_N),
}
"""The least and the greatest value of fields of SamplingOptions, both included."""
BIAS_RANGE = (-100, 100)
"""The least and the greatest value that may be added to a logit, both included."""


class Parsed(NamedTuple):
    """What one call asks for. Engines get the requests; stop strings are the router's business."""

    request_id: str
    requests: list[ClientRequest]
    """One request for each of the `n` answers. They differ in id and seed only."""
    stop: tuple[str, ...]
    include_stop: bool
    """Whether the text ends after the stop string instead of before it."""


def parse_generate(
    asked: CallRequest,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_model_len: int,
    deadline_s: float | None,
    traceparent: str = "",
    account: Account | None = None,
) -> Parsed:
    """Validates and tokenises a request; the cheap checks come first. Raises InvalidRequest. It is slow for long texts,
    so it must not run on an event loop.
    """
    options = asked.sampling
    request_id = uuid.uuid4().hex if asked.request_id is None else check_id(asked.request_id)
    _check_priority(asked.priority)
    _check_salt(asked.cache_salt)
    stop, sampling = _stop_strings(options), _sampling(options, tokenizer, vocab_size)
    if options.n > 1 and options.temperature == 0:
        raise InvalidRequest("n", options.n, "1 without a temperature: all answers would be the same")
    request = ClientRequest(
        request_id=request_id,
        prompt_token_ids=_prompt_token_ids(asked.prompt, tokenizer, vocab_size, max_model_len),
        max_tokens=options.max_tokens,
        sampling=sampling,
        priority=asked.priority,
        deadline_s=deadline_s,
        cache_salt=asked.cache_salt,
        traceparent=traceparent,
        account=account,
    )
    requests = [request] if options.n == 1 else [_numbered(request, index) for index in range(options.n)]
    return Parsed(request_id, requests, stop, options.include_stop_str_in_output)


def num_asked(asked: CallRequest) -> int:
    """Returns how many answers are asked for, which may be invalid. An `n` out of range counts as 1."""
    return asked.sampling.n if 1 <= asked.sampling.n <= MAX_N else 1


def parse_tokenize(prompt: Prompt, tokenizer: Tokenizer) -> Int32:
    """Returns the prompt's token ids. Raises InvalidRequest. It is as slow as `parse_generate`."""
    if prompt.text is not None:
        return tokenizer.encode(prompt.text)
    if prompt.chat is not None:
        return tokenizer.encode_chat(_render(prompt.chat, tokenizer))
    raise InvalidRequest("prompt", "nothing", "one of text and chat must be set")


def check_id(request_id: str) -> str:
    """Returns a request's id. Raises InvalidRequest."""
    if re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}", request_id) is None:
        raise InvalidRequest(
            "request_id", repr(request_id[:32]), f"1 to {MAX_ID_CHARACTERS} printable ASCII characters, no space"
        )
    return request_id


def _numbered(request: ClientRequest, index: int) -> ClientRequest:
    """Returns the request for answer `index` of several. Clients cannot choose its id, because it has a space in it."""
    seed = request.sampling.seed
    sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
    return replace(request, request_id=f"{request.request_id} {index}", sampling=sampling)


def _sampling(options: SamplingOptions, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    for name, (least, greatest) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= greatest:  # NaN is outside, too
            raise InvalidRequest(name, value, f"{least} to {greatest}")
    if not 0 < options.top_p <= 1:
        raise InvalidRequest("top_p", options.top_p, "above 0, at most 1")
    if not -1 <= options.top_k <= MAX_INT32:
        raise InvalidRequest("top_k", options.top_k, f"1 to {MAX_INT32}, or 0 or -1 for all tokens")
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidRequest("min_tokens", options.min_tokens, f"at most max_tokens, which is {options.max_tokens}")
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=_logit_bias(options, vocab_size),
        min_tokens=options.min_tokens,
        logprobs=options.logprobs,
        seed=options.seed,
        stop_token_ids=_stop_token_ids(options, vocab_size),
        ignore_eos=options.ignore_eos,
        grammar=_grammar(options, tokenizer),
    )


def _grammar(options: SamplingOptions, tokenizer: Tokenizer) -> Grammar | None:
    """Compiles what form is asked for, to refuse it here. Engines compile it again, for their tokens."""
    guided = options.guided
    if guided is None:
        return None
    field, kind = guided.field, guided.kind
    if not tokenizer.has_text:
        raise InvalidRequest(field, kind, "none without a tokenizer: answers of this model are numbers")
    if options.ignore_eos:
        raise InvalidRequest("ignore_eos", True, f"false with {field}: the answer ends where nothing may follow")
    if kind == "choice":
        if not guided.choices:
            raise InvalidRequest(field, "0 texts", "at least 1")
        if "" in guided.choices:
            raise InvalidRequest(f"{field}[{list(guided.choices).index('')}]", "''", "must not be empty")
    elif kind != "json_object" and not guided.text:
        raise InvalidRequest(field, "''", "must not be empty")
    grammar = Grammar(kind, json.dumps(list(guided.choices)) if kind == "choice" else guided.text)
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"{num_bytes} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
    from protocol.llguidance_grammars import fault  # takes 0.3 s, which only such requests need

    if said := fault(grammar):
        raise InvalidRequest(field, repr(grammar.text)[:MAX_SHOWN_CHARACTERS], said)
    return grammar


def _prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> Int32:
    if prompt.text is not None:
        _require_room("text", prompt.text, tokenizer, max_model_len)
        token_ids = tokenizer.encode(prompt.text)
    elif prompt.token_ids is not None:
        _require_length(len(prompt.token_ids), max_model_len)  # refused before the copy, which is slow
        token_ids = _in_vocabulary("token_ids", prompt.token_ids, vocab_size)
    elif prompt.chat is not None:
        text = _render(prompt.chat, tokenizer)
        _require_room("chat", text, tokenizer, max_model_len)
        token_ids = tokenizer.encode_chat(text)
    else:
        raise InvalidRequest("prompt", "nothing", "one of text, token_ids and chat must be set")
    _require_length(len(token_ids), max_model_len)
    return _in_vocabulary("token_ids", token_ids, vocab_size)


def _render(chat: Sequence[ChatTurn], tokenizer: Tokenizer) -> str:
    if not 1 <= len(chat) <= MAX_CHAT_MESSAGES:
        raise InvalidRequest("chat", f"{len(chat)} messages", f"1 to {MAX_CHAT_MESSAGES} messages")
    for i, turn in enumerate(chat):
        if not turn.role:
            raise InvalidRequest(f"chat.messages[{i}].role", "''", "must not be empty")
    return tokenizer.render([{"role": turn.role, "content": turn.content} for turn in chat])


def _stop_token_ids(options: SamplingOptions, vocab_size: int) -> tuple[int, ...]:
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(options.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    return tuple(_in_vocabulary("stop_token_ids", options.stop_token_ids, vocab_size).tolist())


def _logit_bias(options: SamplingOptions, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(options.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest("logit_bias", f"{len(options.logit_bias)} tokens", f"at most {MAX_BIASED_TOKENS}")
    least, greatest = BIAS_RANGE
    for token_id, bias in options.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("logit_bias", f"token {token_id}", f"token ids are 0 to {vocab_size - 1}")
        if not least <= bias <= greatest:
            raise InvalidRequest(f"logit_bias[{token_id}]", bias, f"{least} to {greatest}")
    return tuple(sorted(options.logit_bias.items()))


def _stop_strings(options: SamplingOptions) -> tuple[str, ...]:
    if len(options.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(options.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in options.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_CHARACTERS} characters"
            )
    return tuple(options.stop)


def _check_priority(priority: int) -> None:
    if not -MAX_INT32 - 1 <= priority <= MAX_INT32:
        raise InvalidRequest("priority", priority, f"{-MAX_INT32 - 1} to {MAX_INT32}")


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest("cache_salt", f"{len(cache_salt)} characters", f"at most {MAX_SALT_CHARACTERS}")


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


def _in_vocabulary(field: str, token_ids: Sequence[int] | npt.NDArray[np.integer], vocab_size: int) -> Int32:
    """Returns token ids as int32 [num_tokens]. Raises InvalidRequest."""
    try:
        ids = np.array(token_ids, dtype=np.int64)
    except OverflowError:  # one is beyond 64 bits
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field}[{index}]", token_ids[index], f"token ids are 0 to {vocab_size - 1}") from None
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise InvalidRequest(f"{field}[{index}]", int(ids[index]), f"token ids are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)
