"""OpenAI's bodies as the calls that they stand for. Slow for long texts, so it must not run on an event loop."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from protocol.errors import InvalidRequest
from router.call_request import CallRequest, ChatTurn, Guided, Prompt, SamplingOptions
from router.openai.bodies import (
    MAX_SHOWN,
    ChatBody,
    CompletionBody,
    MessageBody,
    SamplingBody,
    StructuredOutputs,
    TokenizeBody,
)
from router.tokenizer import Tokenizer, join_bytes

DEFAULT_TEMPERATURE = 1.0
DEFAULT_MAX_TOKENS = 16
"""Of completions; the answer to a chat may be as long as fits."""
MAX_PROMPTS = 64
MAX_DIGITS = 10
"""Of a token id."""

SAME_NAME = (
    *("top_p", "top_k", "min_p", "n", "seed", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output"),
)
"""Fields that mean what those of SamplingOptions do."""
FIELDS = {"text": "prompt", "token_ids": "prompt"}
CHAT_FIELDS = {"chat": "messages", "logprobs": "top_logprobs"}
"""What `parse.py` calls a field, and what its client does."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`calls`: one for each prompt, with equally many answers. `echoes`: texts before the answers, by prompt."""

    request_id: str
    calls: list[CallRequest]
    echoes: list[str]
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.calls[0].sampling.n


def decode_completion(body: CompletionBody, request_id: str, tokenizer: Tokenizer) -> Asked:
    """`request_id` counts where the body has none. Raises InvalidRequest."""
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("logprobs", body.logprobs, "none with echo: those of prompts are not computed")
    prompts = _prompts(body)
    options = _options(body, body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS, body.logprobs)
    request_id = body.request_id or request_id
    return Asked(
        request_id=request_id,
        calls=_calls(body, prompts, options, request_id),
        echoes=[_text(prompt, tokenizer) for prompt in prompts] if body.echo else [""] * len(prompts),
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        logprobs=body.logprobs is not None,
    )


def decode_chat(body: ChatBody, request_id: str) -> Asked:
    """As `decode_completion`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "none without logprobs: true")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    options = _options(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    request_id = body.request_id or request_id
    calls = _calls(body, [Prompt(chat=decode_messages(body.messages))], options, request_id)
    return Asked(request_id, calls, [""], bool(body.stream), _include_usage(body), bool(body.logprobs))


def decode_tokenize(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "nothing" if body.prompt is None else "both", "one of prompt and messages")
    return Prompt(text=body.prompt) if body.messages is None else Prompt(chat=decode_messages(body.messages))


def decode_messages(messages: Sequence[MessageBody]) -> list[ChatTurn]:
    return [ChatTurn(message.role, _content(message, f"messages[{i}]")) for i, message in enumerate(messages)]


def renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """The error under its client's name of the field."""
    head, dot, rest = error.field.partition(".")
    if dot and head == "chat":  # chat.messages[0].role
        return InvalidRequest(rest, error.value, error.limit)
    name, bracket, index = error.field.partition("[")
    return InvalidRequest(names.get(name, name) + bracket + index, error.value, error.limit)


def _content(message: MessageBody, place: str) -> str:
    if message.tool_calls:
        raise InvalidRequest(f"{place}.tool_calls", f"{len(message.tool_calls)} calls", "tools are not served")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for j, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"{place}.content[{j}].type", repr(part.type)[:64], "only text is served")
    return "".join(cast(str, part.text) for part in message.content)


def _prompts(body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [Prompt(text=prompt)]
    if prompt and isinstance(prompt[0], int):
        return [Prompt(token_ids=prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest("prompt", f"{len(prompt)} prompts", f"1 to {MAX_PROMPTS}")
    several = cast(list[str] | list[list[int]], prompt)
    return [Prompt(text=one) if isinstance(one, str) else Prompt(token_ids=one) for one in several]


def _text(prompt: Prompt, tokenizer: Tokenizer) -> str:
    if prompt.text is not None:
        return prompt.text
    return join_bytes(tokenizer.token_bytes, list(cast(Sequence[int], prompt.token_ids))).decode("utf-8", "replace")


def _calls(
    body: SamplingBody, prompts: Sequence[Prompt], options: SamplingOptions, request_id: str
) -> list[CallRequest]:
    """One by prompt. The ids of several differ by a number."""
    return [
        CallRequest(
            prompt=prompt,
            sampling=options,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
        )
        for i, prompt in enumerate(prompts)
    ]


def _options(body: SamplingBody, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        guided=_guided(body),
        **given,
    )


def _guided(body: SamplingBody) -> Guided | None:
    """What form the answer is to have. It can be asked for in several ways, but only in one at a time."""
    asked: list[Guided] = []
    if (form := body.response_format) is not None and form.type != "text":
        if form.type == "json_object":
            asked.append(Guided("response_format", "json_object"))
        elif form.json_schema is None:
            raise InvalidRequest("response_format.json_schema", "nothing", "a schema for the type json_schema")
        else:
            asked.append(_schema("response_format.json_schema.schema", form.json_schema.json_schema))
    if body.guided_json is not None:
        asked.append(_schema("guided_json", body.guided_json))
    if body.guided_regex is not None:
        asked.append(Guided("guided_regex", "regex", body.guided_regex))
    if body.guided_choice is not None:
        asked.append(Guided("guided_choice", "choice", choices=body.guided_choice))
    if (outputs := body.structured_outputs) is not None:
        asked += _structured(outputs)
    if len(asked) > 1:
        raise InvalidRequest(asked[1].field, "set", f"not together with {asked[0].field}")
    return asked[0] if asked else None


def _structured(outputs: StructuredOutputs) -> list[Guided]:
    for name, value in (outputs.model_extra or {}).items():
        if value:
            raise InvalidRequest(f"structured_outputs.{name[:32]}", repr(value)[:MAX_SHOWN], "not served here")
    asked: list[Guided] = []
    if outputs.json_schema is not None:
        asked.append(_schema("structured_outputs.json", outputs.json_schema))
    if outputs.json_object:
        asked.append(Guided("structured_outputs.json_object", "json_object"))
    if outputs.regex is not None:
        asked.append(Guided("structured_outputs.regex", "regex", outputs.regex))
    if outputs.choice is not None:
        asked.append(Guided("structured_outputs.choice", "choice", choices=outputs.choice))
    return asked


def _schema(field: str, schema: dict[str, Any] | str) -> Guided:
    return Guided(field, "json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS):
            raise InvalidRequest("logit_bias", f"token {key[:32]!r}", "token ids are numbers")
    return {int(key): bias for key, bias in biases.items()}


def _include_usage(body: SamplingBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options", "set", "none without stream: true")
    return bool(body.stream_options.include_usage)
