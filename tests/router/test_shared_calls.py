"""Calls of one client that are open beside each other share a stream of the gRPC door."""

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import twopass
from protocol.errors import Overloaded
from router.admission import ClientRequest
from router.grpc_many import GrpcMany
from tests.hang import HANG_S
from tests.router.scripted_core import ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient, Client
from twopass.many import CREDIT


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The request of each call that went over a shared stream."""
    texts: list[str] = []
    start = GrpcMany._start

    def record(many: GrpcMany, message: Any) -> None:
        texts.append(twopass.proto.twopass_pb2.GenerateRequest.FromString(message.request).request_id)
        start(many, message)

    monkeypatch.setattr(GrpcMany, "_start", record)
    return texts


def test_calls_beside_others_share_a_stream_and_get_their_own_answers(shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            streams = [client.generate(prompt_token_ids=[7], request_id=str(i), logprobs=i % 2) for i in range(20)]
            for _ in streams:
                await s.next_submit()
            for step in range(3):
                for i in range(20):
                    s.core.tokens(str(i), 10 * i + step)
                s.pump()
            for i in range(20):
                s.core.end(str(i), "stop")
            s.pump()
            answers = await asyncio.gather(*(stream.read() for stream in streams))
            assert [answer.token_ids for answer in answers] == [[10 * i, 10 * i + 1, 10 * i + 2] for i in range(20)]
            assert {(answer.finish_reason, answer.usage.completion_tokens) for answer in answers} == {("stop", 3)}
            assert [answer.request_id for answer in answers] == [str(i) for i in range(20)]
            assert sorted(shared, key=int) == [str(i) for i in range(1, 20)]
            alone = client.generate(prompt_token_ids=[7], request_id="alone")
            await s.next_submit()
            await alone.aclose()
            assert "alone" not in shared

    scenario(test)


def threads(works: Sequence[Callable[[], object]]) -> list[object]:
    """What each returns, or the error that it raises, run beside the others."""
    results: list[object] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except twopass.RequestError as error:
            results[i] = error

    running = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(HANG_S)
    return results


def test_threads_share_a_stream_too(shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        with Client(s.address, max_tries=1, timeout_s=HANG_S) as client:

            def work(i: int) -> object:
                return client.generate_text(prompt_token_ids=[i, i + 1]).token_ids

            first = await asyncio.to_thread(client.generate, prompt_token_ids=[1], request_id="held")
            answers = await asyncio.to_thread(threads, [partial(work, i) for i in range(30)])
            assert answers == [[i, i + 1] for i in range(30)]
            assert len(shared) == 30
            s.core.end("held", "length")
            s.pump()
            assert (await asyncio.to_thread(first.read)).token_ids == []

    scenario(test, ScriptedCore(lambda core, request: None if request.request_id == "held" else echo(core, request)))


def test_a_reader_that_stops_slows_only_itself(shared: list[str]) -> None:
    """Its tokens stay at the server, where the limits of a slow reader hold."""

    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        if request.request_id not in ("held", "slow"):
            echo(core, request)

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            held, slow = (client.generate(prompt_token_ids=[1], request_id=name) for name in ("held", "slow"))
            while not s.core.cancelled:
                s.core.tokens("slow", *[5] * 1000)
                s.pump()
                assert (await client.generate_text(prompt_token_ids=[2])).token_ids == [2]
            assert s.core.cancelled == ["slow"]
            assert len(shared) > 2
            with pytest.raises(twopass.Cancelled, match="too slowly"):
                await slow.read()
            await held.aclose()

    scenario(test, ScriptedCore(on_submit), max_buffered_tokens=20_000)


def test_what_is_read_is_allowed_again(shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            held, long = (client.generate(prompt_token_ids=[1], request_id=name) for name in ("held", "long"))
            for _ in range(2):
                await s.next_submit()
            s.core.tokens("long", *[5] * (10 * CREDIT))
            s.core.end("long", "length")
            s.pump()
            assert len((await long.read()).token_ids) == 10 * CREDIT
            await held.aclose()

    scenario(test)


@pytest.mark.parametrize("how", ["close", "drop", "channel"])
def test_a_call_that_is_given_up_ends_alone(how: str, shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        client = AsyncClient(s.address, max_tries=1)
        held = client.generate(prompt_token_ids=[1], request_id="held")
        given_up: twopass.AsyncStream | None = client.generate(prompt_token_ids=[1], request_id="given-up")
        for _ in range(2):
            await s.next_submit()
        s.core.tokens("given-up", 3)
        s.pump()
        assert given_up is not None
        assert (await anext(given_up)).token_ids == [3]
        if how == "close":
            await given_up.aclose()
        elif how == "drop":
            given_up = None
        else:
            await client.close()
        cancelled = {await s.core.calls.get() for _ in range(2 if how == "channel" else 1)}
        assert ("cancel", "given-up") in cancelled
        if how != "channel":
            s.core.tokens("held", 9)
            s.core.end("held", "stop")
            s.pump()
            assert (await held.read()).token_ids == [9]
        await client.close()
        assert s.door.num_open == 0

    scenario(test)


def test_errors_are_those_of_a_call_alone(shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            held = client.generate(prompt_token_ids=[1], request_id="held")
            await s.next_submit()
            with pytest.raises(twopass.InvalidRequest, match="temperature") as wrong:
                await client.generate_text(prompt_token_ids=[1], temperature=-1.0)
            assert wrong.value.field == "temperature"
            failing = client.generate(prompt_token_ids=[1], request_id="failing")
            await s.next_submit()
            s.core.end("failing", error=Overloaded("no engine", retry_after_s=2.0))
            s.pump()
            with pytest.raises(twopass.Overloaded, match="no engine") as failed:
                await failing.read()
            assert failed.value.retry_after_s == 2.0
            late = client.generate(prompt_token_ids=[1], timeout_s=0.2)
            with pytest.raises(twopass.DeadlineExceeded):
                await late.read()
            assert len(shared) == 3
            await held.aclose()

    scenario(test)


def test_a_server_that_goes_ends_all_calls_and_the_next_is_tried(shared: list[str]) -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            streams = [client.generate(prompt_token_ids=[1], request_id=str(i)) for i in range(3)]
            for _ in streams:
                await s.next_submit()
            await s.server.stop(0.0)
            for stream in streams:
                with pytest.raises((twopass.Unavailable, twopass.Cancelled)):
                    await stream.read()

    scenario(test)


def test_a_client_that_is_dropped_leaves_no_thread(shared: list[str]) -> None:
    def answers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "twopass answers"}

    def ask(s: Serving) -> set[threading.Thread]:
        client, before = Client(s.address, max_tries=1, timeout_s=HANG_S), answers()
        streams = [client.generate(prompt_token_ids=[1]) for _ in range(3)]
        assert [stream.read().token_ids for stream in streams] == [[1]] * 3
        return answers() - before

    async def test(s: Serving) -> None:
        (thread,) = await asyncio.to_thread(ask, s)
        gc.collect()
        await asyncio.to_thread(thread.join, HANG_S)
        assert not thread.is_alive()

    scenario(test, ScriptedCore(echo))
