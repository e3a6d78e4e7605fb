"""However a call ends, counters and trace say what its client was told. Calls go over a socket to a scripted core."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import twopass
from protocol.arrays import Int32
from protocol.errors import DeadlineExceeded, RequestFailed
from router.call_request import CallRequest, Prompt
from router.tokenizer import NumberTokenizer
from tests.hang import HANG_S
from tests.router.scripted_core import VOCAB_SIZE, Serving, scenario
from tests.router.test_tracing import Recorded
from twopass import AsyncClient

Told = list[str]
"""How each answer ended for the client, in their order: a finish reason, or the name of a status."""

STATUS_OF = {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "deadline", "UNAVAILABLE": "failed"}


async def stop_string_in_the_last_token(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate(prompt_token_ids=[1], stop="<6>")
    request = await s.next_submit()
    s.core.tokens(request.request_id, 5, 6)
    s.core.end(request.request_id, "length")
    s.pump()
    return [(await stream.read()).finish_reason]


async def stop_string_before_a_failure(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate(prompt_token_ids=[1], stop="<6>")
    request = await s.next_submit()
    s.core.tokens(request.request_id, 5, 6)
    s.core.end(request.request_id, None, DeadlineExceeded("deadline"))
    s.pump()
    return [(await stream.read()).finish_reason]


async def too_much_at_once_to_keep(s: Serving, client: AsyncClient) -> Told:
    """The core has ended the answer before the buffer overflows with its last tokens."""
    stream = client.generate(prompt_token_ids=[1])
    request = await s.next_submit()
    s.core.tokens(request.request_id, *[5] * 101)
    s.core.end(request.request_id, "length")
    s.pump()
    return [await status(stream)]


async def only_piece_too_large_for_the_connection(s: Serving, client: AsyncClient) -> Told:
    """The client does not read. Usually the connection's windows are too small for the piece and the server gives up;
    sometimes it is written after all.
    """
    stream = client.generate(prompt_token_ids=[1])
    request = await s.next_submit()
    s.core.tokens(request.request_id, *[5] * 1_000_000)
    s.core.end(request.request_id, "length")
    s.pump()
    while s.door.num_open:
        await asyncio.sleep(0.001)
    try:
        return [(await stream.read()).finish_reason]
    except twopass.Cancelled as error:
        return [error.status]


async def deadline_of_the_client(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate(prompt_token_ids=[1], timeout_s=0.2)
    await s.next_submit()
    return [await status(stream)]


async def cancelled_by_the_client(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate(prompt_token_ids=[1], timeout_s=1000)
    await s.next_submit()
    await stream.aclose()
    return ["CANCELLED"]


async def aborted_by_another_client(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate(prompt_token_ids=[1], request_id="mine")
    await s.next_submit()
    await client.abort("mine")
    return [await status(stream)]


async def one_of_three_fails(s: Serving, client: AsyncClient) -> Told:
    stream = client.generate("<1>", n=3, temperature=1.0)
    ids = [(await s.next_submit()).request_id for _ in range(3)]
    s.core.end(ids[0], "length")
    s.pump()
    first = await anext(stream)
    s.core.end(ids[1], None, RequestFailed("3 attempts"))
    s.pump()
    failure = await status(stream)
    return [str(first.finish_reason), failure, failure]


class HeldTokenizer(NumberTokenizer):
    """Tokenises a text once `leave` is released. Whoever does so then awaits `left`, so that no later text takes it."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.entered, self.leave, self.left = (threading.Semaphore(0) for _ in range(3))

    def encode(self, text: str) -> Int32:
        self.entered.release()
        assert self.leave.acquire(timeout=HANG_S)
        self.left.release()
        return super().encode(text)


async def status(stream: twopass.AsyncStream) -> str:
    """Returns the status of the error that the stream raises."""
    with pytest.raises(twopass.RequestError) as caught:
        await stream.read()
    return caught.value.status


@pytest.mark.parametrize(
    ("end", "knobs"),
    [
        (stop_string_in_the_last_token, {}),
        (stop_string_before_a_failure, {}),
        (too_much_at_once_to_keep, {"max_buffered_tokens": 100}),
        (only_piece_too_large_for_the_connection, {"max_buffered_tokens": 2_000_000, "write_timeout_s": 0.1}),
        (deadline_of_the_client, {}),
        (cancelled_by_the_client, {}),
        (aborted_by_another_client, {}),
        (one_of_three_fails, {}),
    ],
)
def test_counters_and_trace_say_what_the_client_was_told(
    end: Callable[[Serving, AsyncClient], Awaitable[Told]], knobs: dict[str, Any]
) -> None:
    recorded = Recorded()

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            told = [STATUS_OF.get(word, word) for word in await end(s, client)]
            while s.door.num_open:  # a client that cancels does not wait for the router
                await asyncio.sleep(0)
        totals = s.door.totals
        assert {reason: count for reason, count in totals.ends.items() if count} == {
            word: told.count(word) for word in told
        }
        num_finished = sum(word in ("stop", "length") for word in told)
        assert sum(totals.paths.values()) == sum(totals.total.now.counts) == num_finished
        assert set(totals.refusals.values()) == {0}
        call = recorded.spans["generate"]
        assert call.attributes is not None
        assert [call.attributes[f"twopass.{index}.ended"] for index in range(len(told))] == told
        code = next((code for code, word in STATUS_OF.items() if word in told), "OK")
        assert call.attributes["rpc.response.status_code"] == code

    scenario(test, tracing=recorded.tracing, **knobs)


def test_a_last_piece_that_nobody_takes_ends_nothing() -> None:
    async def test(s: Serving) -> None:
        asked = CallRequest(prompt=Prompt(token_ids=[1]))
        pieces = s.door.generate(lambda: asked, deadline_s=None)
        first = asyncio.ensure_future(anext(pieces))
        s.core.end((await s.next_submit()).request_id, "length")
        s.pump()
        assert (await first).finish_reason == "length"
        await pieces.aclose()
        assert {reason for reason, count in s.door.totals.ends.items() if count} == {"cancelled"}
        assert s.door.totals.paths["colocated"] == sum(s.door.totals.total.now.counts) == 0

    scenario(test)


def test_a_call_that_is_gone_before_it_was_accepted_is_counted_too() -> None:
    recorded = Recorded()
    tokenizer = HeldTokenizer()

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            for timeout_s, cancel in ((20.0, True), (0.1, False)):
                stream = client.generate("<1>", timeout_s=timeout_s)
                await asyncio.to_thread(tokenizer.entered.acquire)
                if cancel:
                    await stream.aclose()
                else:
                    assert await status(stream) == "DEADLINE_EXCEEDED"
                while len(recorded.codes) < 1 + (not cancel):
                    await asyncio.sleep(0)
                tokenizer.leave.release()
                await asyncio.to_thread(tokenizer.left.acquire)
        totals = s.door.totals
        assert {reason: count for reason, count in totals.refusals.items() if count} == {"cancelled": 1, "deadline": 1}
        assert recorded.codes == ["CANCELLED", "DEADLINE_EXCEEDED"]
        assert set(totals.ends.values()) == {0} and s.core.calls.empty()

    scenario(test, tokenizer=tokenizer, tracing=recorded.tracing)
