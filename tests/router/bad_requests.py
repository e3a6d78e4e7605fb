"""Requests that can never be served: a good request with one or several defects, or bytes that are no request."""

import math
from typing import Any

from hypothesis import strategies as st

from tests.router.scripted_core import VOCAB_SIZE
from twopass.proto import twopass_pb2 as pb

MAX_MODEL_LEN = 64
INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)


def outside(least: float, greatest: float) -> st.SearchStrategy[float]:
    edges = [math.nan, math.inf, -math.inf, math.nextafter(least, -math.inf), math.nextafter(greatest, math.inf)]
    return (
        st.sampled_from(edges)
        | st.floats(max_value=least, exclude_max=True)
        | st.floats(min_value=greatest, exclude_min=True)
    )


def integers_outside(least: int, greatest: int = INT32[1]) -> st.SearchStrategy[int]:
    low = st.integers(INT32[0], least - 1)
    return low | st.integers(greatest + 1, INT32[1]) if greatest < INT32[1] else low


not_a_token = integers_outside(0, VOCAB_SIZE - 1)
a_token = st.integers(0, VOCAB_SIZE - 1)
bad_params: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": integers_outside(1),
    "temperature": outside(0, 100),
    "top_k": integers_outside(-1),
    "top_p": outside(0, 1) | st.just(0.0) | st.just(-0.0),
    "min_p": outside(0, 1),
    "stop": st.lists(st.just("x"), min_size=17, max_size=20) | st.just([""]) | st.just(["a", "x" * 257]),
    "stop_token_ids": st.lists(not_a_token, min_size=1, max_size=3) | st.lists(a_token, min_size=65, max_size=70),
    "min_tokens": integers_outside(0),
    "presence_penalty": outside(-2, 2),
    "frequency_penalty": outside(-2, 2),
    "repetition_penalty": outside(0.01, 100),
    "logprobs": integers_outside(0, 20),
    "n": integers_outside(1, 64),
    "guided_regex": st.sampled_from(["", "(a", "a+"]),
    "logit_bias": st.dictionaries(not_a_token, st.just(1.0), min_size=1, max_size=2)
    | st.dictionaries(a_token, outside(-100, 100), min_size=1, max_size=2),
}
bad_fields: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.sampled_from(
        [
            {},
            {"text": ""},
            {"text": "words, no numbers"},
            {"text": "<1> " * MAX_MODEL_LEN},
            {"token_ids": pb.TokenIds()},
            {"chat": pb.Chat()},
            {"chat": pb.Chat(messages=[pb.ChatMessage(content="<1>")])},
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")])},
        ]
    )
    | st.lists(a_token, min_size=MAX_MODEL_LEN, max_size=MAX_MODEL_LEN + 5).map(
        lambda ids: {"token_ids": pb.TokenIds(ids=ids)}
    )
    | st.lists(not_a_token, min_size=1, max_size=3).map(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}),
    "cache_salt": st.just("s" * 257),
    "request_id": st.sampled_from(["", "a b", "ä", "x" * 129, "tab\t", "nul\0"]),
}
good_params: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.001, 100),
    "top_k": st.integers(-1, INT32[1]),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(*INT64),
    "ignore_eos": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(a_token, st.floats(-100, 100), max_size=2),
    "stop": st.lists(st.text(alphabet="a<€", min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(a_token, max_size=3),
    "include_stop_str_in_output": st.booleans(),
}


@st.composite
def good_request(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws the fields of a good request and of its sampling parameters."""
    params = draw(st.fixed_dictionaries({}, optional=good_params))
    fields: dict[str, Any] = {"prompt": {"token_ids": pb.TokenIds(ids=draw(st.lists(a_token, min_size=1, max_size=8)))}}
    fields["priority"] = draw(st.integers(*INT32))
    return fields, params


@st.composite
def bad_message(draw: st.DrawFn) -> pb.GenerateRequest:
    fields, params = draw(good_request())
    names = st.sampled_from([*bad_params, *bad_fields, "two answers, no temperature", "too short"])
    for name in draw(st.lists(names, min_size=1, max_size=3)):
        if name in bad_params:
            params[name] = draw(bad_params[name])
        elif name in bad_fields:
            fields[name] = draw(bad_fields[name])
        elif name == "too short":
            params |= {"max_tokens": 3, "min_tokens": draw(st.integers(4, INT32[1]))}
        else:
            params |= {"n": draw(st.integers(2, 64)), "temperature": 0.0}
    prompt = fields.pop("prompt")
    return pb.GenerateRequest(**prompt, **fields, sampling=pb.SamplingParams(**params))


_CUT_SHORT = b"\x3a\x20id"
"""The beginning of a request id of 32 bytes, of which only two follow."""

bad_data = bad_message().map(lambda message: message.SerializeToString()) | st.binary(max_size=64).map(
    lambda data: data + _CUT_SHORT
)
