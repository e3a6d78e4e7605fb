"""Requests of clients: every good one is parsed, every bad one is refused by the name of a field."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arrays import Int32
from protocol.errors import InvalidRequest
from protocol.messages import SamplingParams
from router.call_request import CallRequest, Prompt, SamplingOptions
from router.grpc_codec import decode_bytes, decode_generate
from router.parse import MAX_CHAT_MESSAGES, Parsed, check_id, parse_generate
from router.tokenizer import NumberTokenizer
from tests.router.bad_requests import MAX_MODEL_LEN, bad_message, good_request
from tests.router.scripted_core import VOCAB_SIZE
from tests.router.small_tokenizer import make_tokenizer
from twopass.proto import twopass_pb2 as pb

SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
)
TOKENIZER = NumberTokenizer(VOCAB_SIZE)
SMALL = make_tokenizer()


def parse(message: pb.GenerateRequest, **limits: Any) -> Parsed:
    limits = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN, "deadline_s": None, **limits}
    return parse_generate(decode_generate(message), limits.pop("tokenizer", TOKENIZER), **limits)


def check(message: pb.GenerateRequest) -> None:
    """Asserts that a message is refused, or becomes requests within every limit."""
    try:
        parsed = parse(message)
    except InvalidRequest:
        return
    for request in parsed.requests:
        sampling = request.sampling
        assert request.prompt_token_ids.dtype == np.int32
        assert 1 <= len(request.prompt_token_ids) < MAX_MODEL_LEN
        assert 0 <= request.prompt_token_ids.min() <= request.prompt_token_ids.max() < VOCAB_SIZE
        assert request.request_id
        assert request.max_tokens is None or request.max_tokens >= max(1, sampling.min_tokens)
        assert 0 <= sampling.temperature <= 100
        assert 0 < sampling.top_p <= 1
        assert 0 <= sampling.min_p <= 1
        assert all(math.isfinite(bias) and 0 <= token_id < VOCAB_SIZE for token_id, bias in sampling.logit_bias)
    assert all(parsed.stop)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        message = decode_bytes(pb.GenerateRequest, data, 4096)
    except InvalidRequest:
        return
    check(message)


int32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 60)
sampling = st.builds(
    pb.SamplingParams,
    max_tokens=st.none() | int32,
    temperature=st.none() | st.floats(),
    top_k=st.none() | int32,
    top_p=st.none() | st.floats(),
    min_p=st.none() | st.floats(),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(alphabet="a<€", max_size=3), max_size=3),
    stop_token_ids=st.lists(int32, max_size=3),
    ignore_eos=st.none() | st.booleans(),
    min_tokens=st.none() | int32,
    presence_penalty=st.none() | st.floats(),
    frequency_penalty=st.none() | st.floats(),
    repetition_penalty=st.none() | st.floats(),
    logprobs=st.none() | int32,
    n=st.none() | int32,
    logit_bias=st.dictionaries(int32, st.floats(), max_size=3),
    include_stop_str_in_output=st.none() | st.booleans(),
)


@given(st.lists(int32, max_size=9), sampling, st.none() | st.text(max_size=4))
def test_any_message_is_a_request_or_refused(ids: list[int], params: pb.SamplingParams, request_id: str | None) -> None:
    try:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=params, request_id=request_id)
    except ValueError:  # lone surrogates
        return
    check(message)


@given(bad_message())
def test_a_request_with_a_defect_is_refused(message: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(message)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    assert caught.value.field


@given(good_request())
def test_a_request_without_a_defect_is_not(request: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fields, params = request
    prompt = fields.pop("prompt")
    parsed = parse(pb.GenerateRequest(**prompt, **fields, sampling=pb.SamplingParams(**params)))
    got = parsed.requests[0].sampling
    for name in SAME_NAME:
        assert getattr(got, name) == params.get(name, getattr(SamplingParams(), name)), name
    assert dict(got.logit_bias) == params.get("logit_bias", {})
    assert parsed.include_stop == params.get("include_stop_str_in_output", False)


def test_every_field_of_the_sampling_parameters_reaches_somebody() -> None:
    """A field that nobody reads would be accepted without effect."""
    elsewhere = {"max_tokens", "stop", "n", "include_stop_str_in_output"}
    grammars = {"guided_json", "guided_json_object", "guided_regex", "guided_choice"}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == elsewhere | grammars | (
        set(SamplingParams.__slots__) - {"grammar"}
    )


def test_several_answers_differ_in_id_and_seed_only() -> None:
    params = pb.SamplingParams(n=3, temperature=1.0, seed=2**63 - 2)
    parsed = parse(pb.GenerateRequest(text="<4> <5>", request_id="mine", sampling=params))
    assert parsed.request_id == "mine"
    assert [request.request_id for request in parsed.requests] == ["mine 0", "mine 1", "mine 2"]
    assert [request.sampling.seed for request in parsed.requests] == [2**63 - 2, 2**63 - 1, 2**63]
    assert all(request.prompt_token_ids is parsed.requests[0].prompt_token_ids for request in parsed.requests)
    unseeded = parse(pb.GenerateRequest(text="<4>", sampling=pb.SamplingParams(n=2, temperature=1.0)))
    assert [request.sampling.seed for request in unseeded.requests] == [None, None], "the router draws one for each"


def test_the_model_length_is_not_checked_before_an_engine_has_named_it() -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 90))
    parsed = parse(message, max_model_len=0, deadline_s=2.0)
    assert len(parsed.requests[0].prompt_token_ids) == 90
    assert parsed.requests[0].deadline_s == 2.0


class Counting:
    """The small tokenizer, which counts the texts that it has to tokenise."""

    has_chat_template, has_text, token_bytes = True, True, SMALL.token_bytes
    render, decode = staticmethod(SMALL.render), staticmethod(SMALL.decode)
    least_tokens = staticmethod(SMALL.least_tokens)

    def __init__(self) -> None:
        self.num_calls = 0

    def encode(self, text: str) -> Int32:
        self.num_calls += 1
        return SMALL.encode(text)

    encode_chat = encode


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Counting()
    longest = max(map(len, [*SMALL.token_bytes, b"<|start|>"]))
    for text in ("x" * (MAX_MODEL_LEN * longest), "€" * (MAX_MODEL_LEN * longest // 3 + 1)):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        for message in (pb.GenerateRequest(text=text), pb.GenerateRequest(chat=chat)):
            with pytest.raises(InvalidRequest, match="at least 6. tokens"):
                parse(message, tokenizer=tokenizer, vocab_size=400)
    assert tokenizer.num_calls == 0
    with pytest.raises(InvalidRequest, match=r"prompt: \d+ tokens"):
        parse(pb.GenerateRequest(text="x" * (MAX_MODEL_LEN - 1) * longest), tokenizer=tokenizer, vocab_size=400)
    assert tokenizer.num_calls == 1


def test_a_chat_of_too_many_messages_is_refused() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="<1>")] * (MAX_CHAT_MESSAGES + 1))
    with pytest.raises(InvalidRequest, match="messages"):
        parse(pb.GenerateRequest(chat=chat))


def test_an_abort_needs_an_id() -> None:
    assert check_id("mine") == "mine"
    with pytest.raises(InvalidRequest):
        check_id("")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (CallRequest(prompt=Prompt(token_ids=[1, 2**80])), "token_ids[1]"),
        (CallRequest(prompt=Prompt(token_ids=[2**31])), "token_ids[0]"),
        (CallRequest(prompt=Prompt(token_ids=[1]), priority=2**31), "priority"),
        *(
            (CallRequest(prompt=Prompt(token_ids=[1]), sampling=sampling), field)
            for field, sampling in (
                ("max_tokens", SamplingOptions(max_tokens=2**70)),
                ("min_tokens", SamplingOptions(min_tokens=2**70)),
                ("top_k", SamplingOptions(top_k=2**70)),
                ("seed", SamplingOptions(seed=2**70)),
            )
        ),
    ],
)
def test_numbers_of_a_dialect_without_bounds_are_refused_by_name(asked: CallRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_generate(asked, TOKENIZER, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, deadline_s=None)
    assert raised.value.field == field
