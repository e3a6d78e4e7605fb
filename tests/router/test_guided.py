"""The form that an answer is to have, in both dialects: what is asked for, and what is refused by which name."""

import json
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.grammar import MAX_GRAMMAR_BYTES, Grammar
from router.call_request import CallRequest
from router.grpc_codec import decode_generate
from router.openai.bodies import ChatBody, CompletionBody, read_body
from router.openai.decode import decode_chat, decode_completion
from router.parse import parse_generate
from router.tokenizer import NumberTokenizer, Tokenizer
from tests.router.small_tokenizer import make_tokenizer
from twopass import InvalidRequest as ClientInvalidRequest
from twopass.proto import twopass_pb2 as pb
from twopass.types import GenerateOptions
from twopass.wire import generate_request

TOKENIZER = make_tokenizer()
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def grammar(asked: CallRequest, tokenizer: Tokenizer = TOKENIZER) -> Grammar | None:
    parsed = parse_generate(asked, tokenizer, vocab_size=400, max_model_len=64, deadline_s=None)
    return parsed.requests[-1].sampling.grammar


def by_grpc(**options: Any) -> CallRequest:
    given: GenerateOptions = options  # type: ignore[assignment]
    return decode_generate(generate_request(None, [1, 2], None, given))


def by_http(**fields: Any) -> CallRequest:
    body, ignored = read_body(CompletionBody, json.dumps({"prompt": [1, 2], **fields}).encode())
    assert ignored == []
    return decode_completion(body, "id", TOKENIZER).calls[0]


@pytest.mark.parametrize(
    ("kind", "grpc", "http"),
    [
        (
            "json_object",
            {"guided_json_object": True},
            [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
        ),
        (
            "json_schema",
            {"guided_json": SCHEMA},
            [
                {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
                {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
                {"guided_json": SCHEMA},
                {"guided_json": json.dumps(SCHEMA)},
                {"structured_outputs": {"json": SCHEMA}},
            ],
        ),
        ("regex", {"guided_regex": "ü+"}, [{"guided_regex": "ü+"}, {"structured_outputs": {"regex": "ü+"}}]),
        (
            "choice",
            {"guided_choice": ["ja", "nein, ü"]},
            [{"guided_choice": ["ja", "nein, ü"]}, {"structured_outputs": {"choice": ["ja", "nein, ü"]}}],
        ),
    ],
)
def test_both_dialects_ask_for_the_same(kind: str, grpc: dict[str, Any], http: list[dict[str, Any]]) -> None:
    found = grammar(by_grpc(**grpc))
    assert found is not None and found.kind == kind
    for fields in http:
        other = grammar(by_http(**fields))
        assert other is not None and other.kind == kind
        if kind == "json_schema":
            assert json.loads(other.text) == json.loads(found.text) == SCHEMA
        else:
            assert other == found


def test_all_answers_of_a_call_have_the_form() -> None:
    assert grammar(by_grpc(guided_regex="a+", n=3, temperature=1.0)) == Grammar("regex", "a+")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": False, "grammar": None, "disable_any_whitespace": False}},
        {"guided_json": None, "guided_regex": None},
    ],
)
def test_a_value_that_asks_for_nothing_is_nothing(fields: dict[str, Any]) -> None:
    assert grammar(by_http(**fields)) is None
    assert grammar(by_grpc(guided_json_object=False)) is None


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        (schema_format({"type": "objekt"}), "response_format.json_schema.schema", "objekt"),
        (schema_format({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
        (schema_format({"enum": []}), "response_format.json_schema.schema", "Unsatisfiable"),
        (schema_format({"$ref": "https://example.org/s"}), "response_format.json_schema.schema", "does not fetch"),
        (schema_format(5), "response_format.json_schema.schema", "an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "requi",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"guided_json": "{"}, "guided_json", "EOF"),
        ({"guided_json": ""}, "guided_json", "not be empty"),
        ({"guided_json": 5}, "guided_json", "an object or"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": ""}, "guided_regex", "not be empty"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "at most 65536 bytes"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "not be empty"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "not together with guided_regex"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "not served"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "not served"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_by_the_clients_name(fields: Any, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar(by_http(**fields))
    assert refused.value.field == field and said in str(refused.value)
    assert len(str(refused.value)) < 600


def test_chats_have_forms_too() -> None:
    body, _ = read_body(
        ChatBody,
        json.dumps(
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
        ).encode(),
    )
    assert grammar(replace(decode_chat(body, "id").calls[0], prompt=by_grpc().prompt)) == Grammar("json_object")


def test_in_grpc_the_field_is_named_as_the_client_wrote_it() -> None:
    for options, field in (
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json_object": True, "ignore_eos": True}, "ignore_eos"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            grammar(by_grpc(**options))
        assert refused.value.field == field


def test_a_model_without_text_has_no_forms() -> None:
    with pytest.raises(InvalidRequest, match="guided_regex: regex is not allowed: none without a tokenizer"):
        grammar(by_grpc(guided_regex="a+"), NumberTokenizer(400))


def test_the_client_takes_one_form_at_a_time() -> None:
    with pytest.raises(ClientInvalidRequest, match="guided_regex: not together with guided_json"):
        by_grpc(guided_json={}, guided_regex="a")
    with pytest.raises(ClientInvalidRequest, match="choices"):
        by_grpc(guided_choice=[5])
    message = pb.GenerateRequest(sampling=pb.SamplingParams(guided_choice=pb.GuidedChoice(choices=["a"])))
    assert message.sampling.WhichOneof("guided") == "guided_choice"
