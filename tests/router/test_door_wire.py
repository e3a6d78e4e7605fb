"""What doors and the core say to each other, as bytes."""

from typing import Any

import numpy as np
import pytest

from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RequestError,
    RequestFailed,
)
from protocol.grammar import Grammar
from protocol.histogram import SECONDS, Histogram
from protocol.messages import Address, SamplingParams, TokenLogprobs
from router.admission import Account, ClientRequest
from router.door_messages import (
    Abort,
    Aborted,
    AskLoads,
    Batch,
    Cancel,
    Counted,
    DoorMessage,
    Facts,
    Loads,
    Opened,
    Stop,
    Submit,
    Taken,
)
from router.door_wire import decode_batch, decode_message, encode_batch, encode_message
from router.metrics_totals import DoorTotals
from router.request import Ended, Usage
from tests.router.test_server import engines


def counts() -> Any:
    totals = DoorTotals()
    totals.refused(Overloaded("full", retry_after_s=1.0), 3)
    totals.first_token.observe(0.2)
    totals.finished("length", "colocated", 2.5, {"decode": 2.5})
    return totals.counts()


@pytest.mark.parametrize(
    "message",
    [Cancel((1, 2**40)), Stop(3), Abort(4, "mine"), AskLoads(5), Taken(6), Counted(counts())],
    ids=lambda message: type(message).__name__,
)
def test_a_doors_message_arrives_as_it_was(message: DoorMessage) -> None:
    assert decode_message(encode_message(message)) == message


def test_a_submit_arrives_as_it_was() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        seed=-(2**63),
        logit_bias=((3, -1.5),),
        stop_token_ids=(9,),
        logprobs=2,
        grammar=Grammar("regex", "a+"),
    )
    request = ClientRequest(
        request_id="mine 0",
        prompt_token_ids=np.array([1, 2, 2**31 - 1], np.int32),
        max_tokens=None,
        sampling=sampling,
        priority=-3,
        deadline_s=1.5,
        cache_salt="salt",
        traceparent="00-1-2-01",
        account=Account("alice", 3, None),
    )
    submit = decode_message(encode_message(Submit(7, "mine", (request,))))
    assert isinstance(submit, Submit)
    (arrived,) = submit.requests
    assert (submit.first, submit.name) == (7, "mine")
    assert arrived.prompt_token_ids.dtype == np.int32 and arrived.prompt_token_ids.flags.writeable
    assert arrived.prompt_token_ids.tolist() == request.prompt_token_ids.tolist()
    for field in ClientRequest.__dataclass_fields__.keys() - {"prompt_token_ids"}:
        assert getattr(arrived, field) == getattr(request, field)


def test_a_batch_arrives_as_it_was() -> None:
    seconds = Histogram(SECONDS)
    seconds.observe(0.1, 3)
    views = [(view, float(age_s)) for age_s, view in enumerate(engines())]
    view = views[0][0]
    view.hashes, view.address = {b"h"}, Address("decode-0", 2**32 - 1)
    batch = Batch(
        5,
        (Opened(1, None),),
        (Aborted(2, True),),
        (Loads(3, 4, 5, tuple(views)),),
        {10: [1, 2, 3], 2**40: [7]},
        {10: [TokenLogprobs(-0.5, (1, 2), (-0.5, float("-inf"))), TokenLogprobs(0.0), TokenLogprobs(-1.0)]},
        ((10, Ended("mine", "stop", None, Usage(1, 2, 3), {"decode": 0.5}, 2, "disaggregated")),),
        Facts(ready=True, max_model_len=4096),
    )
    assert decode_batch(encode_batch(batch)) == batch


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("max_tokens", 5, "at most 4"),
        Overloaded("full", retry_after_s=2.5),
        Draining("going down"),
        DeadlineExceeded("too late"),
        RequestFailed("3 attempts"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_with_its_text_and_its_attributes(error: RequestError) -> None:
    batch = Batch(0, (Opened(1, error),), (), (), {}, {}, (), None)
    refusal: Any = decode_batch(encode_batch(batch)).opened[0].refusal
    assert (type(refusal), str(refusal), refusal.args) == (type(error), str(error), error.args)
    assert {name: str(value) for name, value in vars(refusal).items()} == {
        name: str(value) for name, value in vars(error).items()
    }
    if isinstance(error, Overloaded):
        assert refusal.retry_after_s == 2.5


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x05", encode_message(Taken(1))[:-1], encode_message(Stop(1)) + b"x"])
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="no message of a door"):
        decode_message(data)


def test_what_is_no_batch_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="no batch"):
        decode_batch(b"\x01")
