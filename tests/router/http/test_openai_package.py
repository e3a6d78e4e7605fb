"""The `openai` package against the HTTP door: what people's programs do."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest

from protocol.errors import Overloaded, RequestFailed
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from tests.hang import HANG_S
from tests.router.http.serving import MODEL, http_scenario
from tests.router.scripted_core import ScriptedCore, Serving, echo


def openai_scenario(
    test: Callable[[Serving, openai.AsyncOpenAI], Awaitable[None]], core: ScriptedCore | None = None
) -> None:
    async def run(served: Serving, _: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=HANG_S
        ) as client:
            await test(served, client)

    http_scenario(run, core)


def test_a_completion() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model=MODEL, prompt="<7> <8> ", max_tokens=2)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("<7> <8> ", "length", 0)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 2, 4)
        assert answer.usage.prompt_tokens_details.cached_tokens == 1
        _, request = s.core.calls.get_nowait()
        assert (request.max_tokens, request.sampling.temperature) == (2, 1.0)

    openai_scenario(test, ScriptedCore(echo))


def test_a_streamed_chat_with_usage() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "<1> "}, {"type": "text", "text": "<2>"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "<1> <2> "
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        _, request = s.core.calls.get_nowait()
        assert request.max_tokens is None

    openai_scenario(test, ScriptedCore(echo))


def test_several_prompts_and_answers_are_numbered_prompt_by_prompt() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model=MODEL, prompt=[[1, 2], [3, 4]], n=2, max_tokens=2, echo=True)
        texts = ["<1> <2> <1> <2> ", "<1> <2> <1> <2> ", "<3> <4> <3> <4> ", "<3> <4> <3> <4> "]
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
        stream = await client.completions.create(model=MODEL, prompt=["<1>", "<2>"], stream=True, max_tokens=1)
        said = {choice.index: choice.text async for chunk in stream for choice in chunk.choices if choice.text}
        assert said == {0: "<1> ", 1: "<2> "}

    openai_scenario(test, ScriptedCore(echo))


def scored(core: ScriptedCore, request: ClientRequest) -> None:
    core.tokens(request.request_id, 5, logprobs=(TokenLogprobs(-0.5, (5, 6), (-0.5, -1.0)),))
    core.tokens(request.request_id, 6, logprobs=(TokenLogprobs(-0.25, (6, 5), (-0.25, -2.0)),))
    core.end(request.request_id, "stop")


def test_logprobs_in_both_dialects() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "<1>"}], logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        first, second = chat.choices[0].logprobs.content
        assert (first.token, first.logprob, first.bytes) == ("<5> ", -0.5, list(b"<5> "))
        assert [(other.token, other.logprob) for other in second.top_logprobs] == [("<6> ", -0.25), ("<5> ", -2.0)]
        completion = await client.completions.create(model=MODEL, prompt="<1>", logprobs=2)
        columns = completion.choices[0].logprobs
        assert columns is not None
        assert (columns.tokens, columns.token_logprobs) == (["<5> ", "<6> "], [-0.5, -0.25])
        assert columns.text_offset == [0, 4]
        assert columns.top_logprobs == [{"<5> ": -0.5, "<6> ": -1.0}, {"<6> ": -0.25, "<5> ": -2.0}]

    openai_scenario(test, ScriptedCore(scored))


def overloaded(core: ScriptedCore, request: ClientRequest) -> None:
    raise Overloaded("1024 requests are waiting", retry_after_s=1.5)


def test_errors_are_those_that_the_package_knows() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="<1>", top_p=3.0)
        assert (bad.value.param, bad.value.type) == ("top_p", "invalid_request_error")
        assert "above 0, at most 1" in str(bad.value)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt-4", prompt="<1>")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model=MODEL, prompt="<1>")
        assert full.value.response.headers["retry-after"] == "2"

    openai_scenario(test, ScriptedCore(overloaded))


def test_an_error_in_mid_stream_is_raised_after_what_came_before() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(client.completions.create(model=MODEL, prompt="<1>", stream=True))
        request_id = (await s.next_submit()).request_id
        s.core.tokens(request_id, 5)
        s.pump()
        chunks = aiter(await asking)
        assert (await anext(chunks)).choices[0].text == "<5> "
        s.core.end(request_id, error=RequestFailed("all attempts failed"))
        s.pump()
        with pytest.raises(openai.APIError, match="all attempts failed"):
            await anext(chunks)

    openai_scenario(test)


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        asking = [
            asyncio.create_task(client.completions.create(model=MODEL, prompt="<1>", stream=stream))
            for stream in (False, True)
        ]
        ids = {(await s.next_submit()).request_id for _ in asking}
        for task in asking:
            task.cancel()
        assert {(await s.core.calls.get())[1] for _ in asking} == ids
        await asyncio.gather(*asking, return_exceptions=True)
        assert set(s.core.cancelled) == ids

    openai_scenario(test)


def test_the_model_is_listed() -> None:
    async def test(s: Serving, client: openai.AsyncOpenAI) -> None:
        models = await client.models.list()
        assert [(model.id, model.model_extra) for model in models.data] == [(MODEL, {"max_model_len": 10_000})]
        assert (await client.models.retrieve(MODEL)).id == MODEL

    openai_scenario(test)
