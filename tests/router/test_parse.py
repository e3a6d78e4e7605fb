import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from router.parse import GREEDY, parse_bytes, parse_generate
from router.tokenizer import NumberTokenizer
from twopass.proto import twopass_pb2 as pb

TOKENIZER = NumberTokenizer(50)


def check(message: pb.GenerateRequest) -> None:
    """Either an InvalidRequest, or a request within every limit."""
    try:
        request, stop = parse_generate(message, TOKENIZER, vocab_size=50, max_model_len=8, deadline_s=None)
    except InvalidRequest:
        return
    assert request.prompt_token_ids.dtype == np.int32
    assert 1 <= len(request.prompt_token_ids) <= 7
    assert 0 <= request.prompt_token_ids.min() <= request.prompt_token_ids.max() < 50
    assert request.request_id
    assert request.max_tokens is None or request.max_tokens >= 1
    assert request.sampling.temperature == 0.0
    assert all(stop)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        message = parse_bytes(pb.GenerateRequest, data, 4096)
    except InvalidRequest:
        return
    check(message)


int32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 60)
sampling = st.builds(
    pb.SamplingParams,
    max_tokens=st.none() | int32,
    temperature=st.none() | st.floats(),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(alphabet="a<€", max_size=3), max_size=3),
    stop_token_ids=st.lists(int32, max_size=3),
    ignore_eos=st.none() | st.booleans(),
)


@given(st.lists(int32, max_size=9), sampling, st.none() | st.text(max_size=4))
def test_any_message_is_a_request_or_refused(ids: list[int], params: pb.SamplingParams, request_id: str | None) -> None:
    try:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=params, request_id=request_id)
    except ValueError:  # lone surrogates
        return
    check(message)


def test_the_list_of_greedy_values_names_every_field_that_chooses_tokens() -> None:
    served = {"max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == served | set(GREEDY)


def test_the_model_length_is_not_checked_before_an_engine_has_named_it() -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 9))
    parsed = parse_generate(message, TOKENIZER, vocab_size=50, max_model_len=0, deadline_s=2.0)
    assert len(parsed.request.prompt_token_ids) == 9
    assert parsed.request.deadline_s == 2.0
