"""What else people call the HTTP door with: the `openai` package without asyncio, curl, and the load generators that
write their requests themselves.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protocol.errors import RequestFailed
from router.accounts import hashed
from tests.hang import HANG_S
from tests.router.certificates import Authority
from tests.router.http.serving import MODEL, http_scenario
from tests.router.scripted_core import ScriptedCore, Serving, echo

curl_only = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def package(s: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{s.address}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def test_the_package_without_asyncio() -> None:
    def ask(s: Serving) -> None:
        with package(s) as client:
            answer = client.completions.create(model=MODEL, prompt="<7> <8> ", max_tokens=2)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("<7> <8> ", "length")
            with client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "<1> <2>"}], stream=True
            ) as stream:
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "<1> <2> "
            with pytest.raises(openai.BadRequestError) as bad:
                client.completions.create(model=MODEL, prompt="<1>", temperature=-1)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("gpt-4")

    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        await asyncio.to_thread(ask, s)

    http_scenario(test, ScriptedCore(echo))


def test_the_package_without_asyncio_leaves_and_hears_of_errors() -> None:
    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        client = package(s)

        def begin() -> Any:
            stream = client.completions.create(model=MODEL, prompt="<1>", stream=True)
            assert next(stream).choices[0].text == "<5> "
            return stream

        left, failing = (asyncio.create_task(asyncio.to_thread(begin)) for _ in range(2))
        names = [(await s.next_submit()).request_id for _ in range(2)]
        for name in names:
            s.core.tokens(name, 5)
        s.pump()
        first, second = await left, await failing
        await asyncio.to_thread(first.close)
        name, gone = await s.core.calls.get()
        assert name == "cancel"
        (open_one,) = set(names) - {gone}
        s.core.end(open_one, error=RequestFailed("all attempts failed"))
        s.pump()
        with pytest.raises(openai.APIError, match="all attempts failed"):
            await asyncio.to_thread(next, second)
        client.close()

    http_scenario(test)


async def curl(*arguments: str) -> str:
    running = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--noproxy", "*", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await running.communicate()
    return output.decode()


@curl_only
def test_curl() -> None:
    body = json.dumps({"prompt": "<7> <8> ", "stream": True})

    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        url = f"{s.address}/v1/completions"
        answer = json.loads(await curl(url, "-H", "content-type: application/json", "-d", '{"prompt": "<7>"}'))
        assert answer["choices"][0]["text"] == "<7> "
        assert json.loads(await curl(url, "-d", '{"prompt": "<7>"}'))["object"] == "text_completion"  # as a form
        events = (await curl("-N", url, "-d", body)).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "<7> <8> "
        head, told = (await curl("-i", url, "-d", '{"prompt": 7}')).split("\r\n\r\n")
        assert head.startswith("HTTP/1.1 400 ") and json.loads(told)["error"]["param"] == "prompt"
        assert (await curl("-i", f"{s.address}/v1/nothing")).startswith("HTTP/1.1 404 ")

    http_scenario(test, ScriptedCore(echo))


@curl_only
def test_curl_with_a_certificate_and_a_token(tmp_path: Path) -> None:
    authority, token, tokens = Authority(tmp_path), "a-token", tmp_path / "tokens.yaml"
    cert, key = authority.sign("server")
    tokens.write_text(f"- name: curl\n  sha256: {hashed(token)}\n")

    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        url = f"{s.address.replace('http:', 'https:')}/v1/completions"
        asked = ("--cacert", authority.file, url, "-d", '{"prompt": "<7>"}')
        assert "Bearer" in await curl("-i", *asked)
        answer = json.loads(await curl("-H", f"Authorization: Bearer {token}", *asked))
        assert answer["choices"][0]["text"] == "<7> "
        assert "certificate" in await curl(url)

    http_scenario(test, ScriptedCore(echo), tls_cert_file=cert, tls_key_file=key, tokens_file=str(tokens))


LOAD = {"model": MODEL, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
"""What load generators send beside the prompt, in vLLM's order of things: null where they have nothing to say."""


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        (
            "/v1/completions",
            {"prompt": "<7> <8> ", "max_tokens": 2, "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True},
            lambda choice: choice["text"],
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "<7> <8> "}]}],
                "max_completion_tokens": 2,
                "ignore_eos": True,
            },
            lambda choice: choice["delta"].get("content") or "",
        ),
    ],
)
def test_a_load_generators_requests(path: str, body: dict[str, Any], read: Any) -> None:
    """It takes lines that begin with `data: ` until [DONE], text from the first choice, and the usage from the last."""

    async def test(s: Serving, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", path, json=LOAD | body) as answer:
            assert answer.status_code == 200
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert "".join(read(chunk["choices"][0]) for chunk in chunks if chunk["choices"]) == "<7> <8> "
        assert chunks[-1]["usage"]["completion_tokens"] == 2
        _, request = s.core.calls.get_nowait()
        assert (request.max_tokens, request.sampling.temperature, request.sampling.ignore_eos) == (2, 0.0, True)

    http_scenario(test, ScriptedCore(echo))
