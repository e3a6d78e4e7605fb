"""The client's end of a GenerateMany stream, message by message."""

import grpc
import pytest

from twopass.many import CANCELLED, CREDIT, ENDED, CallFailed, News, OpenCall, OpenCalls
from twopass.proto import twopass_pb2 as pb
from twopass.shared import SharedCall

PROMPT = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
LAST = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(completion_tokens=1))


def opened(num: int) -> tuple[OpenCalls, list[pb.ManyRequest], list[list[News]], list[OpenCall]]:
    sent: list[pb.ManyRequest] = []
    calls, news = OpenCalls(sent.append), [list[News]() for _ in range(num)]
    return calls, sent, news, [calls.start(PROMPT, own.append, 2.5, None) for own in news]


def plain(news: list[News]) -> list[tuple[str, list[int], int]]:
    return [(one.text, list(one.token_ids), one.index) for one in news if not isinstance(one, CallFailed)]


def test_rows_go_to_their_calls() -> None:
    calls, sent, news, _ = opened(3)
    assert [(request.start.call, request.start.credit, request.start.timeout_s) for request in sent] == [
        (0, CREDIT, 2.5),
        (1, CREDIT, 2.5),
        (2, CREDIT, 2.5),
    ]
    calls.receive(pb.ManyResponse(calls=[2, 0], texts=["c", "a"], token_ids=[5, 6]))
    calls.receive(
        pb.ManyResponse(calls=[0, 2, 0], counts=[2, 1, 1], indexes=[0, 0, 1], texts="xyz", token_ids=range(4))
    )
    assert plain(news[0]) == [("a", [6], 0), ("x", [0, 1], 0), ("z", [3], 1)]
    assert plain(news[2]) == [("c", [5], 0), ("y", [2], 0)]
    assert news[1] == []


def test_each_end_comes_once_and_nothing_after_it() -> None:
    calls, sent, news, (first, second, third) = opened(3)
    calls.receive(pb.ManyResponse(responses=[pb.CallResponse(call=0, response=LAST)]))
    calls.receive(pb.ManyResponse(errors=[pb.CallError(call=1, code=3, text="n: wrong", invalid_field="n")]))
    calls.cancel(third)
    for call in (first, second, third):
        calls.cancel(call)
    calls.receive(pb.ManyResponse(calls=[0, 1, 2], texts="abc", token_ids=[1, 2, 3]))
    calls.fail(CANCELLED)
    assert news[0] == [LAST, ENDED]
    (failed,) = news[1]
    assert isinstance(failed, CallFailed)
    assert (failed.code(), failed.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "n: wrong")
    assert failed.trailing_metadata() == (("invalid-field", "n"),)
    assert news[2] == [CANCELLED]
    assert [request.cancel.call for request in sent if request.HasField("cancel")] == [2]
    assert calls.num_open == 0


def test_what_is_read_is_allowed_again_in_halves() -> None:
    calls, sent, _, (call,) = opened(1)
    del sent[:]
    for _ in range(CREDIT - 1):
        calls.took(call, 1)
    (credit,) = sent
    assert (credit.credit.call, credit.credit.num_tokens) == (0, CREDIT // 2)
    calls.cancel(call)
    calls.took(call, CREDIT)
    assert [request.WhichOneof("kind") for request in sent] == ["credit", "cancel"]


def test_an_end_that_many_calls_share_keeps_no_frames() -> None:
    sent: list[pb.ManyRequest] = []
    calls = OpenCalls(sent.append)
    for _ in range(2):
        call = SharedCall(calls, PROMPT, None, None)
        call.cancel()
        with pytest.raises(CallFailed) as cancelled:
            next(call)
        assert cancelled.value.code() is grpc.StatusCode.CANCELLED
    assert CANCELLED.__traceback__ is None


def test_a_stream_that_has_ended_fails_what_is_open_and_what_begins() -> None:
    calls, sent, news, _ = opened(2)
    lost = CallFailed(grpc.StatusCode.UNAVAILABLE, "connection lost")
    assert calls.usable
    calls.fail(lost)
    late: list[News] = []
    calls.start(PROMPT, late.append, None, None)
    assert news == [[lost], [lost]]
    assert late == [lost]
    assert (calls.usable, len(sent)) == (False, 2)
