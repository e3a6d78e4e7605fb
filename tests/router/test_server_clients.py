"""Clients of the gRPC door that go away, are late, or read slowly, over a real loopback socket."""

import asyncio
import threading

import pytest

import twopass
from protocol.arrays import Int32
from router.admission import ClientRequest
from router.tokenizer import NumberTokenizer
from tests.hang import HANG_S
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient


@pytest.mark.parametrize("how", ["close", "drop", "channel"])
def test_a_client_that_goes_away_cancels_its_request(how: str) -> None:
    async def test(s: Serving) -> None:
        client = AsyncClient(s.address, max_tries=1)
        stream: twopass.AsyncStream | None = client.generate(prompt_token_ids=[1])
        request = await s.next_submit()
        s.core.tokens(request.request_id, 3)
        s.pump()
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
        async with AsyncClient(s.address, max_tries=1, timeout_s=HANG_S) as client:
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
        async with AsyncClient(s.address, max_tries=1) as slow, AsyncClient(s.address, max_tries=1) as quick:
            stream = slow.generate(prompt_token_ids=[1], request_id="slow")
            await s.next_submit()
            num_others = 0
            while not s.core.cancelled:
                s.core.tokens("slow", *[5] * 1000)
                s.pump()
                assert (await quick.generate_text(prompt_token_ids=[2])).token_ids == [2]
                num_others += 1
            assert num_others > 1
            with pytest.raises(twopass.Cancelled, match="too slowly"):
                await stream.read()

    scenario(test, ScriptedCore(on_submit), max_buffered_tokens=20_000)


def test_a_client_that_takes_nothing_loses_its_stream() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(prompt_token_ids=[1])
            request = await s.next_submit()
            while s.core.calls.empty():  # once the connection's windows are full, the write stands still
                s.core.tokens(request.request_id, *[5] * 1000)
                s.pump()
                await asyncio.sleep(0)
            assert s.core.calls.get_nowait() == ("cancel", request.request_id)
            with pytest.raises(twopass.Cancelled, match="took nothing"):
                await stream.read()

    scenario(test, max_buffered_tokens=1_000_000_000, write_timeout_s=0.1)


class BlockedTokenizer(NumberTokenizer):
    """Waits for `go` in the thread that tokenises."""

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
        async with AsyncClient(s.address, max_tries=1) as client:
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
