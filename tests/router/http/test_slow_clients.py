"""Clients that connect and say little, or nothing, or read nothing."""

import asyncio
import json
import resource
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from tests.hang import HANG_S
from tests.router.http.serving import http_scenario
from tests.router.scripted_core import ScriptedCore, Serving, echo
from twopass import AsyncClient

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 20\r\n"
NUM_IDLE = 1000


async def connect(s: Serving) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(s.address)
    return await asyncio.open_connection(parts.hostname, parts.port)


@pytest.mark.parametrize("sent", [HEAD[:9], HEAD, HEAD + b"\r\n", HEAD + b'\r\n{"prompt"'])
def test_a_request_that_does_not_come_to_its_end_is_told_so(sent: bytes) -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        reader, writer = await connect(s)
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["message"].endswith("longer than 0.1 s to come (read_timeout_s)")
        writer.close()
        assert (s.door.num_open, (await client.get("/health")).status_code) == (0, 200)

    http_scenario(test, read_timeout_s=0.1)


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        reader, writer = await connect(s)
        assert await reader.read() == b""
        writer.close()

    http_scenario(test, read_timeout_s=0.1)


def test_a_slow_second_request_of_a_connection_is_told_so_too() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        reader, writer = await connect(s)
        writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\nGET /ver")
        answers = await reader.read()
        assert answers.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in answers
        writer.close()

    http_scenario(test, read_timeout_s=0.1)


def test_an_answer_may_take_longer_than_its_request() -> None:
    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        answering = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1]}))
        request = await s.next_submit()
        reader, writer = await connect(s)
        assert await reader.read() == b""  # so long has passed
        writer.close()
        s.core.end(request.request_id, "length")
        s.pump()
        assert (await answering).status_code == 200

    http_scenario(test, read_timeout_s=0.1)


def test_a_thousand_idle_connections_to_each_door_harm_nobody() -> None:
    wanted, (soft, hard) = 5 * NUM_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may have {hard} files here")

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        with ExitStack() as idle:
            for _ in range(NUM_IDLE):
                for port in (s.ports["http_port"], s.ports["grpc_port"]):
                    idle.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S))
                await asyncio.sleep(0)
            answer = await client.post("/v1/completions", json={"prompt": [1, 2]})
            assert answer.json()["usage"]["prompt_tokens"] == 2
            async with AsyncClient(f"127.0.0.1:{s.ports['grpc_port']}", max_tries=1, timeout_s=HANG_S) as other:
                assert (await other.generate_text(prompt_token_ids=[1, 2])).token_ids == [1, 2]

    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        http_scenario(test, ScriptedCore(echo))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_does_not_read_its_events_slows_only_itself() -> None:
    """What the sockets do not take waits in its buffer, whose limit ends its request alone."""
    body = b'{"prompt": [1], "stream": true, "max_tokens": 9000}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", s.ports["http_port"]))
            deaf.sendall(head + body)
            slow = (await s.next_submit()).request_id
            begun = client.stream("POST", "/v1/completions", content=body)
            beginning = asyncio.create_task(begun.__aenter__())
            quick, num_tokens = (await s.next_submit()).request_id, 0
            s.core.tokens(quick, 7)
            s.pump()
            lines = (await beginning).aiter_lines()
            while s.core.calls.empty():
                assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "<7> "
                assert await anext(lines) == ""
                s.core.tokens(slow, *range(900))
                s.core.tokens(quick, 7)
                s.pump()
                num_tokens += 900
            assert s.core.calls.get_nowait() == ("cancel", slow)
            await begun.__aexit__(None, None, None)
            assert 4 * num_tokens < 64 * 2**20  # bytes of text that the kernel or the door took

    http_scenario(test, max_buffered_tokens=2000)
