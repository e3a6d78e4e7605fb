"""Requests that the gRPC door refuses, and how errors of the core reach a client, over a real loopback socket."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings

import twopass
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestError,
    RequestFailed,
)
from router.admission import ClientRequest
from router.config import RouterConfig
from router.grpc_door import HARD_LIMIT_FACTOR, SERVICE
from tests.router.bad_requests import MAX_MODEL_LEN, bad_data
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient
from twopass.proto import twopass_pb2 as pb

MAX_BYTES = RouterConfig().max_message_bytes


async def call_raw(address: str, data: bytes, method: str = "Generate") -> tuple[grpc.StatusCode, str]:
    """Sends any bytes and returns the status and the details that they get."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        kind = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(f"/{SERVICE}/{method}")(data)
        code, details = await call.code(), await call.details()
        assert isinstance(code, grpc.StatusCode)
        return code, str(details)


ERRORS = [
    (InvalidRequest("prompt", "9 tokens", "at most 8"), twopass.InvalidRequest, "INVALID_ARGUMENT"),
    (Overloaded("full", retry_after_s=2.5), twopass.Overloaded, "RESOURCE_EXHAUSTED"),
    (Draining("going down"), twopass.Unavailable, "UNAVAILABLE"),
    (RequestFailed("3 attempts"), twopass.Unavailable, "UNAVAILABLE"),
    (DeadlineExceeded("late"), twopass.DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (RequestCancelled("gone"), twopass.Cancelled, "CANCELLED"),
]


@pytest.mark.parametrize(("error", "kind", "status"), ERRORS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("accepted", [False, True])
def test_every_error_of_the_core_ends_the_call_with_its_status(
    error: RequestError, kind: type[twopass.RequestError], status: str, accepted: bool
) -> None:
    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        if not accepted:
            raise error
        core.tokens(request.request_id, 7)
        core.end(request.request_id, None, error)

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(prompt_token_ids=[1])
            if accepted:
                assert (await anext(stream)).token_ids == [7], "tokens that came before the error arrive"
            with pytest.raises(kind) as caught:
                await anext(stream)
        assert (caught.value.status, str(caught.value)) == (status, str(error))
        assert caught.value.retryable == error.retryable
        if isinstance(caught.value, twopass.Overloaded):
            assert caught.value.retry_after_s == 2.5
        if isinstance(caught.value, twopass.InvalidRequest):
            assert caught.value.field == "prompt"
        assert s.door.num_open == 0

    scenario(test, ScriptedCore(on_submit))


def test_a_bug_in_the_core_is_a_server_error() -> None:
    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        raise ProtocolError("no such row")

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            with pytest.raises(twopass.ServerError):
                await client.generate_text(prompt_token_ids=[1])
            assert (await client.model_info()).max_model_len == 10_000

    scenario(test, ScriptedCore(on_submit))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: 101.0}}, "logit_bias[5]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"prompt_token_ids": []}, "prompt"),
    ({"prompt_token_ids": [1] * 10_000}, "prompt"),
    ({"prompt_token_ids": [1, VOCAB_SIZE]}, "token_ids[1]"),
    ({"prompt_token_ids": [-1]}, "token_ids[0]"),
]


def test_what_is_not_served_is_refused_by_name_before_the_core_sees_it() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            for options, field in REFUSED:
                with pytest.raises(twopass.InvalidRequest) as caught:
                    await client.generate_text(**{"prompt_token_ids": [1], **options})
                assert caught.value.field == field, options
                assert f"{field}: " in str(caught.value)
            for prompt in ("", "no numbers"):
                with pytest.raises(twopass.InvalidRequest):
                    await client.generate_text(prompt)
            for messages in ([], [{"role": "", "content": "<1>"}]):
                with pytest.raises(twopass.InvalidRequest):
                    await client.chat_text(messages)
                with pytest.raises(twopass.InvalidRequest):
                    await client.tokenize(messages=messages)
        for method in ("Generate", "Tokenize"):
            code, details = await call_raw(s.address, b"", method)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "prompt" in details
        assert s.core.calls.empty()

    scenario(test)


def test_errors_carry_the_details_that_other_clients_know() -> None:
    """Details are google.rpc.RetryInfo and BadRequest, which grpc_status.rpc_status and other languages read."""

    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        raise Overloaded("full", retry_after_s=2.5)

    async def details(address: str, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, status_pb2.Status]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(f"/{SERVICE}/Generate")(request.SerializeToString())
            code, text, metadata = await call.code(), await call.details(), dict(await call.trailing_metadata())
            return code, text, status_pb2.Status.FromString(metadata["grpc-status-details-bin"])

    async def test(s: Serving) -> None:
        code, text, status = await details(s.address, pb.GenerateRequest(text="<1>"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (status.code, status.message) == (code.value[0], text)
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
        code, text, status = await details(s.address, pb.GenerateRequest(text="€" * 5000, request_id="é" * 90))
        assert (status.code, status.message) == (code.value[0], text)
        bad = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad)
        assert bad.field_violations[0].field == "request_id"

    scenario(test, ScriptedCore(on_submit))


def test_five_thousand_bad_requests_leave_no_trace() -> None:
    """Each ends with INVALID_ARGUMENT and the name of a field. None reaches the core. A good one is served after."""
    messages: list[bytes] = []

    @settings(
        max_examples=5000, database=None, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(bad_data)
    def collect(data: bytes) -> None:
        messages.append(data)

    collect()
    assert len(messages) >= 5000

    async def test(s: Serving) -> None:
        s.core.max_model_len = MAX_MODEL_LEN
        s.tick()
        async with grpc.aio.insecure_channel(s.address) as channel:
            generate = channel.unary_stream(f"/{SERVICE}/Generate")

            async def send(data: bytes) -> None:
                call = generate(data)
                code, metadata = await call.code(), dict(await call.trailing_metadata())
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (data, await call.details())
                assert metadata["invalid-field"], data

            for start in range(0, len(messages), 50):
                await asyncio.gather(*map(send, messages[start : start + 50]))
        assert s.core.calls.empty()
        assert s.door.num_open == 0
        async with AsyncClient(s.address, max_tries=1) as client:
            assert (await client.generate_text("<1>")).token_ids == [1]

    scenario(test, ScriptedCore(echo))


def serialised(message: ProtoMessage) -> bytes:
    return message.SerializeToString()


DAMAGED = {
    "broken UTF-8": b"\x0a\x02\xff\xfe",
    "an unfinished character": b"\x0a\x01\xc3",
    "endless number": b"\x08" + b"\xff" * 12,
    "cut short": serialised(pb.GenerateRequest(text="hello"))[:-1],
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_damaged_messages_are_invalid_not_internal(data: bytes, method: str) -> None:
    async def test(s: Serving) -> None:
        assert (await call_raw(s.address, data, method))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert (await call_raw(s.address, b"\x08", "GetModelInfo"))[0] is grpc.StatusCode.INVALID_ARGUMENT

    scenario(test)


def test_large_messages() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            with pytest.raises(twopass.InvalidRequest, match="max_message_bytes"):
                await client.generate_text("x" * 5_000_000)
            with pytest.raises(twopass.InvalidRequest, match="max_message_bytes"):
                await client.tokenize("x" * 5_000_000)
            with pytest.raises(twopass.RequestTooLarge) as caught:
                await client.generate_text("x" * (HARD_LIMIT_FACTOR * MAX_BYTES + 1))
            assert not caught.value.retryable
            assert (await client.generate_text("<1>")).token_ids == [1]

    scenario(test, ScriptedCore(echo))
