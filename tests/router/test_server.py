"""The gRPC door over a real loopback socket, in front of a scripted core."""

import asyncio
import socket
import threading
import time
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings

import twopass
from protocol.arrays import Int32
from protocol.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestError,
    RequestFailed,
)
from protocol.messages import ROUTER_ID, Address, Envelope, Hello, PeerGap, ReplicaStatus, RouterStatus, TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.policy import ReplicaView
from router.router import Router
from router.server import HARD_LIMIT_FACTOR, SERVICE
from router.tokenizer import NumberTokenizer
from tests.hang import HANG_S
from tests.router.bad_requests import MAX_MODEL_LEN, bad_data
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving, echo, scenario, serving
from twopass import AsyncClient
from twopass.proto import twopass_pb2 as pb

MAX_BYTES = 4 * 1024 * 1024


async def call_raw(address: str, data: bytes, method: str = "Generate") -> tuple[grpc.StatusCode, str]:
    """Sends bytes of any kind; returns the status and details they get."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        kind = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(f"/{SERVICE}/{method}")(data)
        code, details = await call.code(), await call.details()
        assert isinstance(code, grpc.StatusCode)
        return code, str(details)


def test_answer_streams_in_pieces_and_ends_with_usage_and_timing() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate(
                prompt_token_ids=[1, 2], max_tokens=7, ignore_eos=True, seed=5, stop_token_ids=[9], priority=-1
            )
            request = await s.next_submit()
            s.core.tokens(request.request_id, 3)
            s.door.pump()
            first = await anext(stream)
            s.core.tokens(request.request_id, 4)
            s.core.tokens(request.request_id, 5)
            s.core.end(request.request_id, "length")
            s.door.pump()
            last = await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert (request.max_tokens, request.sampling.ignore_eos, request.sampling.seed, request.priority) == (
            7,
            True,
            5,
            -1,
        )
        assert (request.sampling.stop_token_ids, request.deadline_s, request.prompt_token_ids.tolist()) == (
            (9,),
            None,
            [1, 2],
        )
        assert (first.text, first.token_ids, first.prompt_tokens, first.request_id) == (
            "<3> ",
            [3],
            2,
            request.request_id,
        )
        assert first.finish_reason is None
        assert first.usage is None
        assert first.timing is None
        assert (last.text, last.token_ids, last.finish_reason, last.prompt_tokens) == (
            "<4> <5> ",
            [4, 5],
            "length",
            None,
        )
        assert last.usage == twopass.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)
        assert last.timing is not None
        assert set(last.timing.stages) == {"tokenize", "queue", "decode", "deliver"}
        assert sum(last.timing.stages.values()) == pytest.approx(last.timing.total_s)
        assert 0 < last.timing.ttft_s <= last.timing.total_s
        assert s.core.calls.empty(), "an answer that has ended is not cancelled"
        assert s.door.num_open == 0

    scenario(test)


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
        async with AsyncClient(s.address) as client:
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
        async with AsyncClient(s.address) as client:
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
        async with AsyncClient(s.address) as client:
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
    """google.rpc.RetryInfo and BadRequest, as grpc_status.rpc_status and other languages' libraries read them."""

    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        raise Overloaded("full", retry_after_s=2.5)

    async def details(address: str, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, status_pb2.Status]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(f"/{SERVICE}/Generate")(request.SerializeToString())
            code, text = await call.code(), await call.details()
            return (
                code,
                text,
                status_pb2.Status.FromString(dict(await call.trailing_metadata())["grpc-status-details-bin"]),
            )

    async def test(s: Serving) -> None:
        code, text, status = await details(s.address, pb.GenerateRequest(text="<1>"))
        assert (
            (status.code, status.message)
            == (code.value[0], text)
            == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], str(status.message))
        )
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
    """Each is INVALID_ARGUMENT with the name of a field; none reaches the core, none hangs; then a good one is
    served.
    """
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
        async with grpc.aio.insecure_channel(s.address) as channel:
            generate = channel.unary_stream(f"/{SERVICE}/Generate")

            async def send(data: bytes) -> None:
                call = generate(data)
                code, metadata = await call.code(), dict(await call.trailing_metadata())
                assert (code, bool(metadata["invalid-field"])) == (grpc.StatusCode.INVALID_ARGUMENT, True), (
                    data,
                    await call.details(),
                )

            for start in range(0, len(messages), 50):
                await asyncio.gather(*map(send, messages[start : start + 50]))
        assert s.core.calls.empty()
        assert s.door.num_open == 0
        async with AsyncClient(s.address) as client:
            assert (await client.generate_text("<1>")).token_ids == [1]

    scenario(test, ScriptedCore(echo))


def test_several_answers_share_one_stream() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate(
                prompt_token_ids=[1, 2], n=3, temperature=1.0, seed=7, stop="<9>", request_id="mine", logprobs=1
            )
            requests = [await s.next_submit() for _ in range(3)]
            ids = [request.request_id for request in requests]
            assert [request.sampling.seed for request in requests] == [7, 8, 9]
            assert s.door.num_open == 3
            with pytest.raises(twopass.InvalidRequest, match="still open"):
                await client.generate_text(prompt_token_ids=[1], request_id="mine")
            s.core.tokens(ids[1], 5, 9, 8, logprobs=tuple(TokenLogprobs(-0.5 * i, (4,), (-0.25,)) for i in range(3)))
            s.door.pump()
            first = await anext(stream)
            assert (first.index, first.text, first.token_ids, first.finish_reason) == (1, "<5> ", [5, 9], "stop")
            assert (first.request_id, first.prompt_tokens, first.usage, first.timing) == ("mine", 2, None, None)
            assert first.logprobs == [twopass.TokenLogprobs(0.0, {4: -0.25}), twopass.TokenLogprobs(-0.5, {4: -0.25})]
            assert await s.core.calls.get() == ("stop", ids[1])
            s.core.tokens(ids[0], 6)
            s.core.end(ids[0], "length")
            s.core.tokens(ids[2], 7)
            s.core.tokens(ids[2], 7)
            s.core.end(ids[2], "stop")
            s.door.pump()
            rest = [chunk async for chunk in stream]
        assert [(chunk.index, chunk.token_ids, chunk.finish_reason) for chunk in rest] == [
            (0, [6], "length"),
            (2, [7, 7], "stop"),
        ]
        assert [chunk.request_id for chunk in rest] == [None, None]
        assert rest[0].usage is None
        assert rest[1].usage == twopass.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=5)
        assert rest[1].timing is not None
        assert sum(rest[1].timing.stages.values()) == pytest.approx(rest[1].timing.total_s)
        assert s.core.calls.empty()
        assert s.door.num_open == 0
        async with AsyncClient(s.address) as client:
            answers = client.generate_texts("<1>", n=2, temperature=1.0)
            task = asyncio.create_task(answers)
            for _ in range(2):
                echo(s.core, await s.next_submit())
            s.door.pump()
            assert [(answer.index, answer.token_ids, answer.text) for answer in await task] == [
                (0, [1], "<1> "),
                (1, [1], "<1> "),
            ]
            with pytest.raises(twopass.InvalidRequest, match="generate_texts"):
                await client.generate_text("<1>", n=2, temperature=1.0)

    scenario(test)


def test_the_error_of_one_answer_ends_them_all() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate("<1>", n=2, temperature=1.0)
            ids = [(await s.next_submit()).request_id for _ in range(2)]
            s.core.end(ids[0], None, RequestFailed("3 attempts"))
            s.door.pump()
            with pytest.raises(twopass.Unavailable, match="3 attempts"):
                await stream.read_all()
            assert await s.core.calls.get() == ("cancel", ids[1])
        assert s.door.num_open == 0

    scenario(test)


def test_abort_ends_all_answers_of_a_request_of_any_client() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client, AsyncClient(s.address) as other:
            stream = client.generate("<1>", n=2, temperature=1.0, request_id="mine")
            ids = [(await s.next_submit()).request_id for _ in range(2)]
            assert not await other.abort("yours")
            assert await other.abort("mine")
            with pytest.raises(twopass.Cancelled):
                await stream.read_all()
            assert s.core.cancelled == ids
            with pytest.raises(twopass.InvalidRequest) as caught:
                await other.abort("")
            assert caught.value.field == "request_id"
        assert s.door.num_open == 0

    scenario(test)


def test_server_info_and_loads() -> None:
    core = ScriptedCore()
    hello = Hello(
        role="decode",
        layout_fingerprint=b"l",
        block_size=16,
        num_blocks=100,
        max_num_seqs=8,
        max_model_len=10_000,
        max_prompt_tokens=9999,
        endpoint=b"",
    )
    status = ReplicaStatus(
        state="up",
        seq=3,
        num_waiting=1,
        num_running=2,
        num_leases=0,
        num_pulls=4,
        num_early_handoffs=0,
        num_free_blocks=60,
        transport="shared_memory",
        counters={"steps": 9.0},
        num_scheduled_tokens=({"a": 5, "b": 1},),
    )
    core.engines = [
        ReplicaView(Address("decode-0", 7), hello, time.monotonic() - 2.0, "up", 3, status=status),
        ReplicaView(Address("decode-1", 8), hello, time.monotonic(), "suspected"),
    ]
    core.num_queued = 5

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            info = await client.server_info()
            assert (info.model, info.max_model_len, info.ready, info.max_queue) == ("arithmetic", 10_000, True, 1024)
            assert info.max_message_bytes == MAX_BYTES
            assert info.uptime_s > 0
            loads = await client.loads()
        assert (loads.num_open, loads.num_queued) == (0, 5)
        first, second = loads.replicas
        assert (first.replica_id, first.epoch, first.role, first.state, first.in_flight) == (
            "decode-0",
            7,
            "decode",
            "up",
            3,
        )
        assert (first.num_blocks, first.block_size, first.max_num_seqs) == (100, 16, 8)
        assert (first.num_waiting, first.num_running, first.num_free_blocks, first.num_leases, first.num_pulls) == (
            1,
            2,
            60,
            0,
            4,
        )
        assert (first.transport, first.counters, first.num_scheduled_tokens) == (
            "shared_memory",
            {"steps": 9.0},
            [{"a": 5, "b": 1}],
        )
        assert first.age_s >= 2.0
        assert (second.state, second.num_waiting, second.num_scheduled_tokens) == ("suspected", None, [])

    scenario(test, core)


def test_a_stop_string_may_be_part_of_the_text() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            params: dict[str, Any] = {"stop": "<6>", "min_tokens": 2, "include_stop_str_in_output": True}
            done = await client.generate_text(prompt_token_ids=[5, 6, 7, 6, 8], **params)
            assert (done.text, done.token_ids, done.finish_reason) == ("<5> <6> <7> <6>", [5, 6, 7, 6], "stop")

    scenario(test, ScriptedCore(echo))


def test_values_that_change_nothing_are_served() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            done = await client.generate_text(
                prompt_token_ids=[1, VOCAB_SIZE - 1],
                temperature=0.0,
                top_k=-1,
                top_p=1.0,
                min_p=0.0,
                min_tokens=0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                repetition_penalty=1.0,
                n=1,
                cache_salt="tenant",
            )
            assert (done.text, done.usage.completion_tokens) == ("<1> <999> ", 2)
            request = await s.next_submit()
            assert (request.max_tokens, request.sampling.seed, request.cache_salt) == (None, None, "tenant")
            chat = await client.chat_text([{"role": "user", "content": "<4>"}])
            assert chat.token_ids == [4]
            assert await client.tokenize("<4> <5>") == [4, 5]
            assert await client.tokenize(messages=[{"role": "user", "content": "<4>"}]) == [4]
            assert await client.model_info() == twopass.ModelInfo("arithmetic", 10_000, VOCAB_SIZE, True)

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
        async with AsyncClient(s.address) as client:
            with pytest.raises(twopass.InvalidRequest, match="max_message_bytes"):
                await client.generate_text("x" * 5_000_000)
            with pytest.raises(twopass.InvalidRequest, match="max_message_bytes"):
                await client.tokenize("x" * 5_000_000)
            with pytest.raises(twopass.RequestTooLarge) as caught:
                await client.generate_text("x" * (HARD_LIMIT_FACTOR * MAX_BYTES + 1))
            assert not caught.value.retryable
            assert (await client.generate_text("<1>")).token_ids == [1]

    scenario(test, ScriptedCore(echo))


@pytest.mark.parametrize("how", ["close", "drop", "channel"])
def test_a_client_that_goes_away_cancels_its_request(how: str) -> None:
    async def test(s: Serving) -> None:
        client = AsyncClient(s.address)
        stream: twopass.AsyncStream | None = client.generate(prompt_token_ids=[1])
        request = await s.next_submit()
        s.core.tokens(request.request_id, 3)
        s.door.pump()
        assert stream is not None
        assert (await anext(stream)).token_ids == [3]
        if how == "close":
            await stream.aclose()
        elif how == "drop":
            stream = None
        else:
            await client.close()
        assert await s.core.calls.get() == ("cancel", request.request_id)
        assert s.door.num_open == 0
        await client.close()

    scenario(test)


def test_deadline_reaches_the_core_and_its_passing_cancels_the_request() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, timeout_s=HANG_S) as client:
            stream = client.generate(prompt_token_ids=[1], timeout_s=1)
            request = await s.next_submit()
            assert request.deadline_s is not None
            assert 0 < request.deadline_s < 2
            with pytest.raises(twopass.DeadlineExceeded):
                await anext(stream)
            assert await s.core.calls.get() == ("cancel", request.request_id)
            other = client.generate(prompt_token_ids=[1])
            request = await s.next_submit()
            assert request.deadline_s is not None
            assert 2 < request.deadline_s < HANG_S + 2  # gRPC rounds up
            await other.aclose()

    scenario(test)


def test_a_slow_client_slows_only_itself() -> None:
    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        if request.request_id != "slow":
            echo(core, request)

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as slow, AsyncClient(s.address) as quick:
            stream = slow.generate(prompt_token_ids=[1], request_id="slow")
            await s.next_submit()
            num_others = 0
            while not s.core.cancelled:
                s.core.tokens("slow", *[5] * 1000)
                s.door.pump()
                assert (await quick.generate_text(prompt_token_ids=[2])).token_ids == [2]
                num_others += 1
            assert num_others > 1
            with pytest.raises(twopass.Cancelled, match="too slowly"):
                await stream.read()

    scenario(test, ScriptedCore(on_submit), max_buffered_tokens=20_000)


def test_a_client_that_takes_nothing_loses_its_stream() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate(prompt_token_ids=[1])
            request = await s.next_submit()
            while s.core.calls.empty():  # fills the connection's windows, then the write stands still
                s.core.tokens(request.request_id, *[5] * 1000)
                s.door.pump()
                await asyncio.sleep(0)
            assert s.core.calls.get_nowait() == ("cancel", request.request_id)
            with pytest.raises(twopass.Cancelled, match="took nothing"):
                await stream.read()

    scenario(test, max_buffered_tokens=1_000_000_000, write_timeout_s=0.1)


def test_a_stop_string_ends_the_answer_for_client_and_core() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate(prompt_token_ids=[1], stop=["> <6", "never"])
            request = await s.next_submit()
            s.core.tokens(request.request_id, 5)
            s.door.pump()
            assert (await anext(stream)).text == "<5"  # "> " may be the beginning of the stop string
            s.core.tokens(request.request_id, 61, 7, 8)
            s.door.pump()
            last = await anext(stream)
            assert (last.text, last.token_ids, last.finish_reason) == ("", [61], "stop")
            assert last.usage is not None
            assert last.usage.completion_tokens == 2
            assert await s.core.calls.get() == ("stop", request.request_id)
            assert s.core.calls.empty()

    scenario(test)


def test_a_stop_string_in_the_last_tokens_needs_no_stop_of_the_core() -> None:
    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        core.tokens(request.request_id, 5, 6, 7)
        core.end(request.request_id, "length")

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            done = await client.generate_text(prompt_token_ids=[1], stop="<6>")
            assert (done.text, done.token_ids, done.finish_reason) == ("<5> ", [5, 6], "stop")
            await s.next_submit()
            assert s.core.calls.empty()
            held = await client.generate_text(prompt_token_ids=[1], stop="<7> <8>")
            assert (held.text, held.finish_reason) == ("<5> <6> <7> ", "length"), (
                "what was held back comes out at the end"
            )

    scenario(test, ScriptedCore(on_submit))


def test_a_request_id_is_free_again_after_the_end() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            first = client.generate(prompt_token_ids=[1], request_id="mine")
            assert (await s.next_submit()).request_id == "mine"
            with pytest.raises(twopass.InvalidRequest) as caught:
                await client.generate_text(prompt_token_ids=[2], request_id="mine")
            assert caught.value.field == "request_id"
            s.core.tokens("mine", 8)
            s.core.end("mine", "stop")
            s.door.pump()
            assert (await first.read()).token_ids == [8]
            again = client.generate(prompt_token_ids=[1], request_id="mine")
            await s.next_submit()
            await again.aclose()

    scenario(test)


class BlockedTokenizer(NumberTokenizer):
    """Waits for `go` in its thread."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.entered, self.go = threading.Event(), threading.Event()

    def encode(self, text: str) -> Int32:
        self.entered.set()
        assert self.go.wait(HANG_S)
        return super().encode(text)


def test_tokenisation_leaves_the_event_loop_free_and_its_queue_is_bounded() -> None:
    tokenizer = BlockedTokenizer()

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            waiting = asyncio.create_task(client.generate_text("<1>"))
            assert await asyncio.to_thread(tokenizer.entered.wait, 20)
            with pytest.raises(twopass.Overloaded) as caught:
                await client.tokenize("<2>")
            assert caught.value.retry_after_s > 0
            assert (await client.model_info()).model == "arithmetic"
            tokenizer.go.set()
            assert (await waiting).token_ids == [1]
            assert await client.tokenize("<2>") == [2]

    scenario(test, ScriptedCore(echo), tokenizer=tokenizer, max_queue=1)


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def main() -> None:
            async with serving(ScriptedCore(), grpc_port=port):
                pass

        with pytest.raises(CapacityError, match=str(port)):
            asyncio.run(main())


def test_two_servers_never_share_a_port() -> None:
    async def test(s: Serving) -> None:
        with pytest.raises(CapacityError):
            async with serving(ScriptedCore(), grpc_port=int(s.address.rsplit(":", 1)[1])):
                pass

    scenario(test)


def test_health_follows_the_core_and_reflection_names_the_service() -> None:
    core = ScriptedCore()
    core.ready = False

    async def test(s: Serving) -> None:
        async with grpc.aio.insecure_channel(s.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            core.ready = True
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            core.ready = False
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert SERVICE in names
            assert "grpc.health.v1.Health" in names

    scenario(test, core, tick_interval_s=0.001)


def test_stop_lets_open_answers_end_and_takes_nothing_new() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client, AsyncClient(s.address) as late:
            stream = client.generate(prompt_token_ids=[1])
            request = await s.next_submit()
            stopping = asyncio.create_task(s.server.stop(20.0))
            assert await s.core.calls.get() == ("drain", 20.0)
            s.core.tokens(request.request_id, 3)
            s.core.end(request.request_id, "stop")
            s.door.pump()
            assert (await stream.read()).token_ids == [3]
            await stopping
            await s.server.wait()
            with pytest.raises(twopass.Unavailable):
                await late.generate_text(prompt_token_ids=[1])

    scenario(test)


def test_what_is_open_at_the_end_of_the_grace_gets_the_error_of_the_core() -> None:
    class Core(ScriptedCore):
        def drain(self, deadline_s: float) -> None:
            self.end("mine", None, Draining("the deployment was shut down"))

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            stream = client.generate(prompt_token_ids=[1], request_id="mine")
            await s.next_submit()
            await s.server.stop(0.0)
            with pytest.raises(twopass.Unavailable, match="shut down"):
                await stream.read()

    scenario(test, Core())


def test_the_real_core_fits_behind_the_door() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address) as client:
            with pytest.raises(twopass.Unavailable):
                await client.generate_text(prompt_token_ids=[1] * 100)

    scenario(test, Router(RouterConfig(), address=Address(ROUTER_ID, 1), clock=time.monotonic, seed=0))


def test_wait_raises_what_broke_the_core() -> None:
    core = ScriptedCore()

    async def test(s: Serving) -> None:
        core.tick_error = ProtocolError("row 9 of table 2")
        with pytest.raises(ProtocolError, match="row 9"):
            await s.server.wait()

    scenario(test, core, tick_interval_s=0.001)


def test_messages_go_in_and_out() -> None:
    async def test(s: Serving) -> None:
        engine, router = Address("decode-0", 1), Address(ROUTER_ID, 1)
        envelope = Envelope(engine, router, 0, PeerGap(peer=engine))
        status = RouterStatus(router_epoch=1, seq=0, prefill_room_blocks=0, prefill_max_tokens=0)
        s.core.outbox.append((engine, status))
        s.door.deliver(envelope)
        assert s.core.calls.get_nowait() == ("handle", envelope)
        assert s.sent == [(engine, status)]
        assert s.core.outbox == []

    scenario(test)
