"""The bodies of requests, as OpenAI names their fields, and vLLM those that OpenAI does not have.

What is of a wrong type is refused by its place in the body. Fields that nobody knows are ignored, and named to the
client. Fields that ask for something which is not served are refused, unless their value asks for nothing.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import InvalidRequest

UNSERVED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "best_of": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    **dict.fromkeys(("guided_grammar", "guided_whitespace_pattern", "structural_tag"), ()),
    "web_search_options": (),
    "prediction": (),
}
"""Fields that are refused, and the values beside null that ask for nothing."""
HARMLESS = frozenset(
    ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "skip_special_tokens", "safety_identifier")
)
"""Fields that change nothing here and that nobody needs to be told of."""
MAX_SHOWN = 64
"""Characters of a value that an error repeats."""

_TYPES = frozenset(("str", "int", "bool", "float", "dict", "ContentPart"))
"""What pydantic adds to the place of a fault where a field may have one of several types."""

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class ModelBody(Body):
    model: str | None = None
    """None: whatever is served."""


class JsonSchema(Body):
    """OpenAI's `name`, `description` and `strict` change nothing: every schema is strict."""

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None


class SamplingBody(ModelBody):
    """What completions and chats have in common. None, as null, stands for the default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(union_mode="left_to_right")
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(Body):
    type: str
    text: str | None = None


class MessageBody(Body):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(SamplingBody):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(ModelBody):
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: Literal[True] | None = None
    add_generation_prompt: Literal[True] | None = None


class DetokenizeBody(ModelBody):
    tokens: list[int]


def read_body(kind: type[B], data: bytes) -> tuple[B, list[str]]:
    """Returns a body and the names of its fields that nobody knows. Raises InvalidRequest."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(error) from None
    extra = body.model_extra or {}
    for name, nothing in UNSERVED.items():
        value = extra.get(name)
        if value is not None and value not in nothing:
            raise InvalidRequest(name, repr(value)[:MAX_SHOWN], "not served here")
    return body, sorted(name for name in extra if name not in UNSERVED and name not in HARMLESS)


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first fault. A value that fits none of several types has one for each, whose texts are joined."""
    faults = error.errors(include_url=False)
    field, value = _place(faults[0]["loc"]), faults[0]["input"]
    limits = dict.fromkeys(fault["msg"] for fault in faults if _place(fault["loc"]) == field)
    if faults[0]["type"] == "missing":
        shown = "nothing"
    else:
        shown = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return InvalidRequest(field or "body", shown[:MAX_SHOWN], " or ".join(limits))


def _place(location: tuple[int | str, ...]) -> str:
    """Where in the body, as in `messages[0].role`."""
    names = [name for name in location if isinstance(name, int) or (name.isidentifier() and name not in _TYPES)]
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).lstrip(".")
