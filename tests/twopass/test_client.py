"""The client against a real server on loopback. tests/router tests the server's own behaviour."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

import twopass
from router.admission import ClientRequest
from tests.hang import HANG_S
from tests.router.scripted_core import ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient, Client
from twopass.proto import twopass_pb2 as pb

SILENT = 999
"""A prompt that begins with this token gets one token and no end."""


def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
    if request.prompt_token_ids[0] == SILENT:
        core.tokens(request.request_id, SILENT)
    else:
        echo(core, request)


def blocking(test: Callable[[str, Serving], None]) -> None:
    """Runs a test of the blocking client in a thread beside the server's event loop."""

    async def run(s: Serving) -> None:
        await asyncio.to_thread(test, s.address, s)

    scenario(run, ScriptedCore(on_submit))


def test_the_example_of_the_module() -> None:
    def test(address: str, s: Serving) -> None:
        with Client(address) as c:
            texts = [chunk.text for chunk in c.generate("<1> <2>", max_tokens=32, temperature=0.0)]
            assert "".join(texts) == "<1> <2> "
            r = c.generate_text(prompt_token_ids=[3, 4], max_tokens=48, ignore_eos=True)
        assert (r.text, r.token_ids, r.finish_reason) == ("<3> <4> ", [3, 4], "length")
        assert r.usage == twopass.Usage(2, 1, 2)
        assert r.timing.attempts == 1
        assert r.timing.total_s >= r.timing.ttft_s > 0

    blocking(test)


def test_chat_tokenize_and_model_info() -> None:
    def test(address: str, s: Serving) -> None:
        with Client(address) as c:
            messages = [{"role": "user", "content": "<5>"}]
            assert c.chat_text(messages, max_tokens=3).token_ids == [5]
            assert [chunk.token_ids for chunk in c.chat(messages)] == [[5]]
            assert c.tokenize("<5> <6>") == [5, 6]
            assert c.tokenize(messages=messages) == [5]
            assert c.model_info() == twopass.ModelInfo("arithmetic", 10_000, 1000, True)

    blocking(test)


def test_several_answers_and_what_goes_on_there() -> None:
    def test(address: str, s: Serving) -> None:
        with Client(address) as c:
            messages = [{"role": "user", "content": "<5>"}]
            for answers in (
                c.generate_texts("<5>", n=2, temperature=1.0, logprobs=0),
                c.chat_texts(messages, n=2, temperature=1.0),
            ):
                assert [(answer.index, answer.token_ids) for answer in answers] == [(0, [5]), (1, [5])]
                assert [answer.usage for answer in answers] == [twopass.Usage(1, 1, 2)] * 2
            with pytest.raises(twopass.InvalidRequest, match="chat_texts"):
                c.chat_text(messages, n=2)
            with pytest.raises(twopass.InvalidRequest, match="read_all"):
                c.generate("<1>", n=2, temperature=1.0).read()
            assert c.server_info().ready
            assert c.loads() == twopass.Loads(0, 0, [])
            assert not c.abort("nobody")
            stream = c.generate(prompt_token_ids=[SILENT], request_id="mine")
            assert next(stream).token_ids == [SILENT]
            assert c.abort("mine")
            with pytest.raises(twopass.Cancelled):
                next(stream)

    blocking(test)


@pytest.mark.parametrize("how", ["close", "with", "drop", "client"])
def test_leaving_a_stream_cancels_the_request(how: str) -> None:
    def test(address: str, s: Serving) -> None:
        client = Client(address)
        stream: twopass.Stream | None = client.generate(prompt_token_ids=[SILENT], request_id="mine")
        assert stream is not None
        assert next(stream).token_ids == [SILENT]
        if how == "close":
            stream.close()
        elif how == "with":
            with stream:
                pass
        elif how == "drop":
            stream = None
            gc.collect()
        else:
            client.close()
        assert cancelled.wait(HANG_S)
        if how == "close" and stream is not None:
            with pytest.raises(twopass.Cancelled):
                next(stream)
        client.close()

    cancelled = threading.Event()

    class Core(ScriptedCore):
        def cancel(self, request_id: str) -> None:
            assert request_id == "mine"
            super().cancel(request_id)
            cancelled.set()

    async def run(s: Serving) -> None:
        await asyncio.to_thread(test, s.address, s)

    scenario(run, Core(on_submit))


def test_a_request_starts_before_it_is_iterated() -> None:
    async def test(s: Serving) -> None:
        client = Client(s.address)
        stream = client.generate(prompt_token_ids=[SILENT])
        await s.next_submit()
        stream.close()
        await asyncio.to_thread(client.close)

    scenario(test, ScriptedCore(on_submit))


def test_many_threads_share_a_client() -> None:
    def test(address: str, s: Serving) -> None:
        with Client(address) as c:
            answers: dict[int, list[int]] = {}
            threads = [
                threading.Thread(
                    target=lambda i=i: answers.update({i: c.generate_text(prompt_token_ids=[i]).token_ids})
                )
                for i in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        assert answers == {i: [i] for i in range(8)}

    blocking(test)


def test_timeout_of_the_call_before_that_of_the_client() -> None:
    def test(address: str, s: Serving) -> None:
        with Client(address, timeout_s=60) as c, pytest.raises(twopass.DeadlineExceeded):
            c.generate_text(prompt_token_ids=[SILENT], timeout_s=0.1)
        with Client(address, timeout_s=0.1) as c, pytest.raises(twopass.DeadlineExceeded):
            c.generate_text(prompt_token_ids=[SILENT])

    blocking(test)


NOT_A_REQUEST: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "<1>", "prompt_token_ids": [1]}, "prompt"),
    ({"prompt": 5}, "text"),
    ({"prompt": "\ud800"}, "text"),
    ({"prompt_token_ids": [2**31]}, "ids"),
    ({"prompt_token_ids": ["a"]}, "ids"),
    ({"prompt_token_ids": 5}, "ids"),
    ({"prompt": "<1>", "max_tokens": 2**31}, "max_tokens"),
    ({"prompt": "<1>", "max_tokens": "3"}, "max_tokens"),
    ({"prompt": "<1>", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "<1>", "seed": 2**63}, "seed"),
    ({"prompt": "<1>", "stop": [3]}, "stop"),
    ({"prompt": "<1>", "request_id": 3}, "request_id"),
    ({"prompt": "<1>", "logit_bias": {"a": 1.0}}, "logit_bias"),
    ({"prompt": "<1>", "logit_bias": {5: "b"}}, "logit_bias"),
    ({"prompt": "<1>", "maximum_tokens": 3}, "maximum_tokens"),
]


@pytest.mark.parametrize(("options", "field"), NOT_A_REQUEST, ids=str)
def test_what_no_message_can_hold_is_refused_by_name_before_it_is_sent(options: dict[str, Any], field: str) -> None:
    with Client("127.0.0.1:1") as c:
        with pytest.raises(twopass.InvalidRequest, match=field) as caught:
            c.generate(**options)
        assert caught.value.field == field


def test_messages_of_the_wrong_shape_are_refused_too() -> None:
    with Client("127.0.0.1:1") as c:
        with pytest.raises(twopass.InvalidRequest):
            c.chat([{"role": "user", "text": "x"}])
        with pytest.raises(twopass.InvalidRequest):
            c.tokenize()
        with pytest.raises(twopass.InvalidRequest):
            c.tokenize("x", messages=[])


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as c:
        with pytest.raises(twopass.Unavailable) as caught:
            c.generate_text("<1>")
        assert caught.value.retryable
        with pytest.raises(twopass.Unavailable):
            c.model_info()


def test_a_closed_client_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    for call in (lambda: client.generate("<1>"), client.model_info, lambda: client.tokenize("<1>")):
        with pytest.raises(twopass.ClientClosed):
            call()

    async def main() -> None:
        closed = AsyncClient("127.0.0.1:1")
        await closed.close()
        for attempt in (closed.generate_text("<1>"), closed.model_info(), closed.tokenize("<1>")):
            with pytest.raises(twopass.ClientClosed):
                await attempt

    asyncio.run(main())


ODD_ENDINGS: dict[str, list[pb.GenerateResponse]] = {
    "nothing": [],
    "no end": [pb.GenerateResponse(text="a")],
    "no usage": [pb.GenerateResponse(text="a", finish_reason=pb.FINISH_REASON_STOP)],
    "no end of one answer": [
        pb.GenerateResponse(text="a"),
        pb.GenerateResponse(index=1, finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(), timing=pb.Timing()),
    ],
    "an unknown end": [pb.GenerateResponse(text="a", finish_reason=pb.FINISH_REASON_UNSPECIFIED)],
}


@pytest.mark.parametrize("messages", ODD_ENDINGS.values(), ids=ODD_ENDINGS.keys())
def test_a_status_ok_without_an_end_is_an_error(messages: list[pb.GenerateResponse]) -> None:
    async def generate(request: bytes, context: Any) -> None:
        for message in messages:
            await context.write(message.SerializeToString())

    async def main() -> None:
        server = grpc.aio.server()
        handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("twopass.v1.Twopass", handlers),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        with Client(address) as client:
            with pytest.raises(twopass.ServerError):
                await asyncio.to_thread(client.generate_text, "x")
            with pytest.raises(twopass.NotSupported):
                await asyncio.to_thread(client.model_info)
        async with AsyncClient(address) as other:
            with pytest.raises(twopass.ServerError):
                await other.generate_text("x")
            with pytest.raises(twopass.NotSupported):
                await other.tokenize("x")
        await server.stop(0)

    asyncio.run(main())


def test_the_client_brings_in_nothing_of_the_server() -> None:
    libraries = ["torch", "ray", "numpy", "tokenizers", "jinja2", "pydantic", "yaml"]
    servers = [*libraries, "protocol", "router", "engine", "cluster"]
    program = f"import sys, twopass; print([name for name in {servers} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
