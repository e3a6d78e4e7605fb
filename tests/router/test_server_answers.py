"""Answers through the gRPC door, over a real loopback socket, in front of a scripted core."""

import asyncio
from typing import Any

import pytest

import twopass
from protocol.errors import (
    RequestFailed,
)
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient


def test_the_options_of_a_call_reach_the_core() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(
                prompt_token_ids=[1, 2], max_tokens=7, ignore_eos=True, seed=5, stop_token_ids=[9], priority=-1
            )
            request = await s.next_submit()
            await stream.aclose()
        assert (request.prompt_token_ids.tolist(), request.max_tokens, request.priority) == ([1, 2], 7, -1)
        sampling = request.sampling
        assert (sampling.ignore_eos, sampling.seed, sampling.stop_token_ids) == (True, 5, (9,))
        assert request.deadline_s is None

    scenario(test)


def test_answer_streams_in_pieces_and_ends_with_usage_and_timing() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(prompt_token_ids=[1, 2])
            name = (await s.next_submit()).request_id
            s.core.tokens(name, 3)
            s.pump()
            first = await anext(stream)
            s.core.tokens(name, 4)
            s.core.tokens(name, 5)
            s.core.end(name, "length")
            s.pump()
            last = await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert (first.text, first.token_ids, first.prompt_tokens, first.request_id) == ("<3> ", [3], 2, name)
        assert (first.finish_reason, first.usage, first.timing) == (None, None, None)
        assert (last.text, last.token_ids, last.finish_reason) == ("<4> <5> ", [4, 5], "length")
        assert (last.prompt_tokens, last.request_id) == (None, None)
        assert last.usage == twopass.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)
        assert last.timing is not None
        assert set(last.timing.stages) == {"tokenize", "queue", "decode", "deliver"}
        assert sum(last.timing.stages.values()) == pytest.approx(last.timing.total_s)
        assert 0 < last.timing.ttft_s <= last.timing.total_s
        assert s.core.calls.empty(), "an answer that has ended is not cancelled"
        assert s.door.num_open == 0

    scenario(test)


def test_several_answers_share_one_stream() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
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
            s.pump()
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
            s.pump()
            rest = [chunk async for chunk in stream]
        told = [(chunk.index, chunk.token_ids, chunk.finish_reason) for chunk in rest]
        assert told == [(0, [6], "length"), (2, [7, 7], "stop")]
        assert [chunk.request_id for chunk in rest] == [None, None]
        assert rest[0].usage is None
        assert rest[1].usage == twopass.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=5)
        assert rest[1].timing is not None
        assert sum(rest[1].timing.stages.values()) == pytest.approx(rest[1].timing.total_s)
        assert s.core.calls.empty()
        assert s.door.num_open == 0

    scenario(test)


def test_several_answers_are_waited_for_together() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            answers = client.generate_texts("<1>", n=2, temperature=1.0)
            task = asyncio.create_task(answers)
            for _ in range(2):
                echo(s.core, await s.next_submit())
            s.pump()
            told = [(answer.index, answer.token_ids, answer.text) for answer in await task]
            assert told == [(0, [1], "<1> "), (1, [1], "<1> ")]
            with pytest.raises(twopass.InvalidRequest, match="generate_texts"):
                await client.generate_text("<1>", n=2, temperature=1.0)

    scenario(test)


def test_the_error_of_one_answer_ends_them_all() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate("<1>", n=2, temperature=1.0)
            ids = [(await s.next_submit()).request_id for _ in range(2)]
            s.core.end(ids[0], None, RequestFailed("3 attempts"))
            s.pump()
            with pytest.raises(twopass.Unavailable, match="3 attempts"):
                await stream.read_all()
            assert await s.core.calls.get() == ("cancel", ids[1])
        assert s.door.num_open == 0

    scenario(test)


def test_abort_ends_all_answers_of_a_request_of_any_client() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client, AsyncClient(s.address, max_tries=1) as other:
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


def test_values_that_change_nothing_are_served() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
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


def test_a_stop_string_ends_the_answer_for_client_and_core() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(prompt_token_ids=[1], stop=["> <6", "never"])
            request = await s.next_submit()
            s.core.tokens(request.request_id, 5)
            s.pump()
            assert (await anext(stream)).text == "<5"  # "> " may be the beginning of a stop string
            s.core.tokens(request.request_id, 61, 7, 8)
            s.pump()
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
        async with AsyncClient(s.address, max_tries=1) as client:
            done = await client.generate_text(prompt_token_ids=[1], stop="<6>")
            assert (done.text, done.token_ids, done.finish_reason) == ("<5> ", [5, 6], "stop")
            await s.next_submit()
            assert s.core.calls.empty()
            held = await client.generate_text(prompt_token_ids=[1], stop="<7> <8>")
            assert (held.text, held.finish_reason) == ("<5> <6> <7> ", "length"), "held back text comes at the end"

    scenario(test, ScriptedCore(on_submit))


def test_a_stop_string_may_be_part_of_the_text() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            params: dict[str, Any] = {"stop": "<6>", "min_tokens": 2, "include_stop_str_in_output": True}
            done = await client.generate_text(prompt_token_ids=[5, 6, 7, 6, 8], **params)
            assert (done.text, done.token_ids, done.finish_reason) == ("<5> <6> <7> <6>", [5, 6, 7, 6], "stop")

    scenario(test, ScriptedCore(echo))


def test_a_request_id_is_free_again_after_the_end() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            first = client.generate(prompt_token_ids=[1], request_id="mine")
            assert (await s.next_submit()).request_id == "mine"
            with pytest.raises(twopass.InvalidRequest) as caught:
                await client.generate_text(prompt_token_ids=[2], request_id="mine")
            assert caught.value.field == "request_id"
            s.core.tokens("mine", 8)
            s.core.end("mine", "stop")
            s.pump()
            assert (await first.read()).token_ids == [8]
            again = client.generate(prompt_token_ids=[1], request_id="mine")
            await s.next_submit()
            await again.aclose()

    scenario(test)
