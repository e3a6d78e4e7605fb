"""What the HTTP door does with requests as they come over the wire, good and bad."""

import asyncio
import json
import os
import socket
from typing import Any

import httpx
import pytest

from protocol.errors import CapacityError, Draining
from router.admission import ClientRequest
from router.http_door import IGNORED_HEADER
from tests.router.http.serving import MODEL, http_scenario, http_serving
from tests.router.scripted_core import ScriptedCore, Serving, echo

CHAT = {"messages": [{"role": "user", "content": "<1>"}]}


def refusal(path: str, body: Any, **knobs: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of what is posted: bytes, or a value as JSON."""
    told: list[tuple[int, dict[str, Any]]] = []

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
        told.append((answer.status_code, answer.json()["error"]))
        assert s.door.num_open == 0

    http_scenario(test, ScriptedCore(echo), **knobs)
    return told[0]


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("/v1/completions", {}, "prompt", "nothing is not allowed"),
        ("/v1/completions", {"prompt": 5}, "prompt", "valid string or"),
        ("/v1/completions", {"prompt": []}, "prompt", "1 to 64"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt", "at least 1 token"),
        ("/v1/completions", {"prompt": [1, 2**70]}, "prompt[1]", "token ids are 0 to 999"),
        ("/v1/completions", {"prompt": "<1>", "max_tokens": "5"}, "max_tokens", "valid integer"),
        ("/v1/completions", {"prompt": "<1>", "max_tokens": 0}, "max_tokens", "1 to"),
        ("/v1/completions", {"prompt": "<1>", "logit_bias": {"x": 1}}, "logit_bias", "token ids are numbers"),
        ("/v1/completions", {"prompt": "<1>", "echo": True, "logprobs": 1}, "logprobs", "none with echo"),
        ("/v1/completions", {"prompt": "<1>", "suffix": "end"}, "suffix", "not served"),
        ("/v1/completions", {"prompt": "<1>", "guided_json": {}}, "guided_json", "none without a tokenizer"),
        ("/v1/completions", {"prompt": "<1>", "guided_grammar": "x"}, "guided_grammar", "not served"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json"}}, "response_format.type", "json_schema"),
        ("/v1/completions", {"prompt": "<1>", "stream_options": {"include_usage": True}}, "stream_options", "none"),
        ("/v1/chat/completions", {"messages": []}, "messages", "1 to 4096"),
        ("/v1/chat/completions", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "not be empty"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools", "not served"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "0 to 20"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "only text",
        ),
        ("/v1/completions", b"{", "body", "Invalid JSON"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', "body", "Invalid JSON"),
        ("/tokenize", {}, "prompt", "one of prompt and messages"),
        ("/detokenize", {"tokens": [1, 1000]}, "tokens[1]", "token ids are 0 to 999"),
    ],
)
def test_bad_bodies_are_refused_by_the_name_of_the_field(path: str, body: Any, param: str, reason: str) -> None:
    status, error = refusal(path, body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert reason in error["message"]


def test_a_large_body_is_refused_before_it_is_parsed() -> None:
    status, error = refusal("/v1/completions", {"prompt": "<1>" * 99}, max_message_bytes=64)
    assert status == 413 and "at most 64 bytes (max_message_bytes)" in error["message"]


def test_fields_that_nobody_knows_are_named_to_the_client() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        body = {"prompt": "<1>", "frobnicate": 1, "user": "me", "tools": [], "best_of": None}
        body["response_format"] = {"type": "text"}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        assert (answer.headers[IGNORED_HEADER], answer.headers["x-request-id"]) == ("frobnicate", "mine")
        assert answer.json()["id"] == "cmpl-mine"

    http_scenario(test, ScriptedCore(echo))


@pytest.mark.parametrize(
    ("name", "shown"), [("a\nb: c", "a\\nb: c"), ("\0", "\\x00"), ("ö \U0001f389", "\\xf6 \\U0001f389")]
)
def test_any_name_of_a_field_fits_into_a_header(name: str, shown: str) -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "<1>", name: 1})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, shown)

    http_scenario(test, ScriptedCore(echo))


def test_a_stream_as_bytes() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "<1>", "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, nothing = answer.text.split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        first = json.loads(events[0].removeprefix("data: "))
        assert (first["object"], first["model"], first["choices"][0]["text"]) == ("text_completion", MODEL, "<1> ")

    http_scenario(test, ScriptedCore(echo))


def test_what_is_said_of_the_server() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        s.core.ready = False
        s.tick()
        assert (await client.get("/ready")).status_code == 503
        assert set((await client.get("/version")).json()) == {"version"}
        assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")
        tokens = (await client.post("/tokenize", json={"prompt": "<1> <2>"})).json()
        assert tokens == {"tokens": [1, 2], "count": 2, "max_model_len": 10_000}
        assert (await client.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "<1> <2> "}
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/nowhere")).json()["error"]["message"] == "Not Found"
        assert (await client.get("/v1/completions")).status_code == 405

    http_scenario(test)


def drained(core: ScriptedCore, request: ClientRequest) -> None:
    raise Draining("the deployment is draining")


def test_a_draining_server_says_when_to_try_again() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "<1>"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    http_scenario(test, ScriptedCore(drained))


def test_one_bad_prompt_of_several_ends_all() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": ["<1>", "<2000>"]})
        assert answer.status_code == 400
        await asyncio.wait_for(nothing_open(s), 30)

    async def nothing_open(s: Serving) -> None:
        while s.door.num_open:
            await asyncio.sleep(0)

    http_scenario(test)


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """The kernel does it once what was sent stays unread for `write_timeout_s`; then the request is cancelled."""

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        host, port = s.address.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            body = b'{"prompt": "<1>", "stream": true, "max_tokens": 100000}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            deaf.sendall(head + body)
            request_id = (await s.next_submit()).request_id
            while s.core.calls.empty():
                s.core.tokens(request_id, *range(900))
                s.pump()
                await asyncio.sleep(0.01)
            assert s.core.calls.get_nowait() == ("cancel", request_id)

    http_scenario(test, write_timeout_s=0.3, max_buffered_tokens=10**9)


def test_an_answer_is_not_held_back_for_what_may_follow() -> None:
    """Its head and its body are two writes, of which Nagle's algorithm would hold back the second."""

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        await client.get("/health")
        port = s.ports["http_port"]
        accepted = [sock for sock in _sockets_of_this_process() if sock.getsockname()[1] == port]
        assert len(accepted) >= 2  # it and the one that listens
        assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in accepted)

    http_scenario(test)


def _sockets_of_this_process() -> list[socket.socket]:
    """Duplicates of those that have an IPv4 address."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=number)
        except OSError:  # no socket
            os.close(number)
            continue
        if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
            found.append(sock)
        else:
            sock.close()
    return found


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(CapacityError, match=f"http_port: 127.0.0.1:{port} is taken"):
                async with http_serving(ScriptedCore(), http_port=port):
                    pass

    asyncio.run(main())
