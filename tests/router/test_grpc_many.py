"""GenerateMany streams in front of a scripted core, message by message over a real loopback socket."""

import asyncio
import math
from typing import Any, cast

import pytest

from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, RequestFailed
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.grpc_many import MAX_ERRORS, GrpcMany
from router.many_calls import ManyCalls
from tests.router.many_stream import generate_request, many_stream
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, Serving, echo, scenario
from tests.router.test_server_refusals import DAMAGED
from tests.router.test_told import HeldTokenizer
from tests.router.test_tracing import TRACEPARENT
from twopass.proto import twopass_pb2 as pb


async def until_closed(s: Serving) -> None:
    """Waits until the server has forgotten all calls."""
    while s.door.num_open:
        await asyncio.sleep(0)


def test_a_step_is_one_message_and_only_first_and_last_pieces_have_more_than_columns() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            names = ["a", "b", "c"]
            for number, name in zip((3, 5, 8), names, strict=True):
                await many.start(number, token_ids=[1, 2], request_id=name)
                await s.next_submit()
                s.core.tokens(name, 6)
                s.pump()
                (first,) = (await many.read()).responses
                assert (first.call, first.response.request_id, first.response.prompt_tokens) == (number, name, 2)
            for token_id, name in enumerate(names, 7):
                s.core.tokens(name, token_id)
            s.pump()
            assert await many.read() == pb.ManyResponse(
                calls=[3, 5, 8], token_ids=[7, 8, 9], texts=["<7> ", "<8> ", "<9> "]
            )
            s.core.tokens(names[0], 7, 8)
            s.core.tokens(names[2], 9)
            s.core.tokens(names[1], 1)
            s.core.end(names[1], "length")
            s.pump()
            last = await many.read()
            assert (list(last.calls), list(last.counts), list(last.token_ids)) == ([3, 8], [2, 1], [7, 8, 9])
            (row,) = last.responses
            assert (row.call, list(row.response.token_ids)) == (5, [1])
            assert row.response.finish_reason == pb.FINISH_REASON_LENGTH
            assert row.response.usage == pb.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)
            assert sum(row.response.timing.stages.values()) == pytest.approx(row.response.timing.total_s)
        await until_closed(s)
        assert s.core.cancelled == [names[0], names[2]]

    scenario(test)


def test_what_a_call_asks_for_reaches_the_core() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address, traceparent=TRACEPARENT) as many:
            await many.start(0, token_ids=[1, 2], max_tokens=7, seed=5, priority=-1, timeout_s=3.0)
            request = await s.next_submit()
            assert (request.prompt_token_ids.tolist(), request.max_tokens, request.priority) == ([1, 2], 7, -1)
            assert request.sampling.seed == 5
            assert request.deadline_s is not None and 0 < request.deadline_s <= 3
            assert request.traceparent == TRACEPARENT
            own = TRACEPARENT.replace("0af", "1bf")
            await many.start_bytes(1, generate_request(text="<1>").SerializeToString(), traceparent=own)
            request = await s.next_submit()
            assert (request.traceparent, request.deadline_s) == (own, None)

    scenario(test)


def test_answers_of_one_call_keep_their_indexes_and_their_order() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(1, text="<1>", n=3, temperature=1.0)
            names = [(await s.next_submit()).request_id for _ in range(3)]
            s.core.tokens(names[2], 4)
            s.core.tokens(names[0], 5)
            s.pump()
            first = await many.read()
            assert [row.response.HasField("request_id") for row in first.responses] == [True, False]
            for name in names:
                s.core.tokens(name, 6)
            s.pump()
            step = await many.read()
            assert (list(step.indexes), list(step.token_ids), len(step.responses)) == ([0, 1, 2], [6, 6, 6], 0)
            for name in names:
                s.core.tokens(name, 7)
                s.core.end(name, "length")
            s.pump()
            await many.read_until_ended(1)
        pieces = many.pieces[1]
        assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].usage.completion_tokens == 8
        told = {index: [piece.token_ids for piece in pieces if piece.index == index] for index in range(3)}
        assert told == {0: [[5], [6], [7]], 1: [[6], [7]], 2: [[4], [6], [7]]}

    scenario(test)


ERRORS = [
    (InvalidRequest("prompt", "9 tokens", "at most 8"), 3, {"invalid_field": "prompt"}),
    (Overloaded("full", retry_after_s=2.5), 8, {"retry_after_s": 2.5}),
    (RequestFailed("3 attempts"), 14, {"retry_after_s": 1.0}),
    (DeadlineExceeded("late"), 4, {}),
]


@pytest.mark.parametrize(("error", "code", "more"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("accepted", [False, True])
def test_an_error_ends_its_own_call_alone(error: RequestError, code: int, more: dict[str, Any], accepted: bool) -> None:
    def on_submit(core: ScriptedCore, request: ClientRequest) -> None:
        if request.request_id == "bad":
            if not accepted:
                raise error
            core.tokens(request.request_id, 7)
            core.end(request.request_id, None, error)

    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", request_id="good")
            await s.next_submit()
            await many.start(1, text="<1>", request_id="bad")
            await many.read_until_ended(1)
            assert many.errors[1] == pb.CallError(call=1, code=code, text=str(error), **more)
            assert many.token_ids(1) == ([7] if accepted else []), "tokens that came before the error arrive"
            s.core.tokens("good", 5)
            s.core.end("good", "stop")
            s.pump()
            await many.read_until_ended(0)
            assert many.token_ids(0) == [5]
            await until_closed(s)
        assert s.core.cancelled == []

    scenario(test, ScriptedCore(on_submit))


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_request_ends_its_own_call_alone(data: bytes) -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start_bytes(0, data)
            await many.start_bytes(1, b"")
            await many.start(2, text="x" * 4_194_304)
            await many.start(3, text="<1>", timeout_s=math.nan)
            await many.start(4, text="<1>", credit=0)
            await many.start(5, text="<1>", timeout_s=-1.0)
            await many.start(6, text="<1>")
            await many.read_until_ended(*range(7))
            fields = [many.errors[number].invalid_field for number in range(5)]
            assert fields == ["message", "prompt", "message", "timeout_s", "credit"]
            assert {many.errors[number].code for number in range(5)} == {3}
            assert "max_message_bytes" in many.errors[2].text
            assert many.token_ids(6) == [1]

    class Core(ScriptedCore):
        def submit(self, *requests: ClientRequest, **door: Any) -> None:
            if requests[0].deadline_s is not None:
                raise DeadlineExceeded("late")
            super().submit(*requests, **door)

    scenario(test, Core(echo))


def sent(**kind: Any) -> bytes:
    return pb.ManyRequest(**kind).SerializeToString()


BREACHES: dict[str, tuple[bytes, str]] = {
    "noise": (bytes(range(256)), "no twopass.v1.ManyRequest"),
    "cut short": (sent(cancel=pb.Cancel(call=1))[:-1], "no twopass.v1.ManyRequest"),
    "nothing": (b"", "kind: nothing"),
    "the number of another call": (sent(start=pb.Start(call=7, credit=1)), "call: 7 is not allowed: above 7"),
    "a negative number": (sent(start=pb.Start(call=-1, credit=1)), "call: -1 is not allowed: above 7"),
    "cancel of no call": (sent(cancel=pb.Cancel(call=8)), "call: 8 is not allowed: 0 to 7"),
    "credit for no call": (sent(credit=pb.Credit(call=-3, num_tokens=5)), "call: -3 is not allowed: 0 to 7"),
}


@pytest.mark.parametrize(("data", "text"), BREACHES.values(), ids=BREACHES.keys())
def test_a_message_that_breaks_the_contract_ends_the_stream(data: bytes, text: str) -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(7, text="<1>", request_id="open")
            await s.next_submit()
            await many.grpc.write(data)
            status, details = await many.status()
            assert status == "INVALID_ARGUMENT"
            assert text in details
        await until_closed(s)
        assert s.core.cancelled == ["open"]

    scenario(test)


def test_bad_credit_ends_its_call_and_late_words_about_ended_calls_are_ignored() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", request_id="a")
            await s.next_submit()
            await many.credit(0, 0)
            await many.read_until_ended(0)
            assert (many.errors[0].code, many.errors[0].invalid_field) == (3, "num_tokens")
            await many.credit(0, 5)
            await many.cancel(0)
            await many.start(1, text="<1>", request_id="b")
            assert await s.core.calls.get() == ("cancel", "a")
            await s.next_submit()
            echo_and_pump(s, "b")
            await many.read_until_ended(1)

    scenario(test)


def echo_and_pump(s: Serving, name: str) -> None:
    s.core.tokens(name, 1)
    s.core.end(name, "length")
    s.pump()


def test_a_cancelled_call_ends_and_says_nothing_more() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", n=2, temperature=1.0, request_id="a")
            await many.start(1, text="<1>", request_id="b")
            names = [(await s.next_submit()).request_id for _ in range(3)]
            await many.cancel(0)
            assert await s.core.calls.get() == ("cancel", names[0])
            assert await s.core.calls.get() == ("cancel", names[1])
            echo_and_pump(s, "b")
            await many.read_until_ended(1)
        assert set(many.pieces) == {1} and not many.errors
        await until_closed(s)
        assert s.door.totals.ends["cancelled"] == 2

    scenario(test)


def test_a_call_that_is_cancelled_before_it_is_open_is_counted() -> None:
    tokenizer = HeldTokenizer()

    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>")
            await asyncio.to_thread(tokenizer.entered.acquire)
            await many.cancel(0)
            await many.start(1, text="<1>", n=2, temperature=1.0, timeout_s=0.001)
            await asyncio.to_thread(tokenizer.entered.acquire)
            await many.cancel(1)
            while sum(s.door.totals.refusals.values()) < 3:
                await asyncio.sleep(0)
            for _ in range(2):
                tokenizer.leave.release()
                await asyncio.to_thread(tokenizer.left.acquire)
        assert not many.pieces and not many.errors
        assert s.core.calls.empty()
        told = {reason: count for reason, count in s.door.totals.refusals.items() if count}
        assert told == {"cancelled": 1, "deadline": 2}

    scenario(test, tokenizer=tokenizer)


def test_a_reader_without_credit_slows_only_itself() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", credit=3, request_id="slow")
            await many.start(1, text="<1>", request_id="quick")
            for _ in range(2):
                await s.next_submit()
            for token_id in range(10, 20):
                s.core.tokens("slow", token_id)
                s.core.tokens("quick", token_id)
                s.pump()
                await many.read_tokens(1, token_id - 9)
            assert many.token_ids(0) == [10, 11, 12]
            await many.credit(0, 2)
            await many.read_tokens(0, 5)
            s.core.end("slow", "length")
            s.core.end("quick", "length")
            s.pump()
            await many.read_until_ended(1)
            assert many.token_ids(0) == [10, 11, 12, 13, 14] and not many.is_complete(0)
            await many.credit(0, 5)
            await many.read_until_ended(0)
            assert many.token_ids(0) == list(range(10, 20))
            assert many.text(0) == many.text(1)

    scenario(test)


def test_credit_is_shared_by_the_answers_of_a_call() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", n=2, temperature=1.0, credit=3)
            names = [(await s.next_submit()).request_id for _ in range(2)]
            for name in names:
                s.core.tokens(name, 5, 6)
                s.core.end(name, "length")
            s.pump()
            await many.read_tokens(0, 3)
            await many.credit(0, 1)
            await many.read_until_ended(0)
            assert sorted(many.token_ids(0)) == [5, 5, 6, 6]

    scenario(test)


def test_logprobs_go_with_their_tokens_when_credit_parts_them() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", logprobs=1, credit=2)
            name = (await s.next_submit()).request_id
            s.core.tokens(name, 5, 6, 7, logprobs=tuple(TokenLogprobs(-0.5 * i, (i,), (-0.25,)) for i in range(3)))
            s.core.end(name, "length")
            s.pump()
            await many.read_tokens(0, 2)
            await many.credit(0, 9)
            await many.read_until_ended(0)
            told = [[values.logprob for values in piece.logprobs] for piece in many.pieces[0]]
            assert told == [[0.0, -0.5], [-1.0]]

    scenario(test)


def test_a_stop_string_among_tokens_without_credit() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", stop=["<6>"], credit=1)
            name = (await s.next_submit()).request_id
            s.core.tokens(name, 5, 6, 7, 8)
            s.pump()
            await many.read_tokens(0, 1)
            assert s.core.calls.empty()
            await many.credit(0, 1)
            assert await s.core.calls.get() == ("stop", name)
            await many.read_until_ended(0)
            assert (many.text(0), many.token_ids(0)) == ("<5> ", [5, 6])
            assert many.pieces[0][-1].finish_reason == pb.FINISH_REASON_STOP

    scenario(test)


def test_too_much_for_a_reader_without_credit() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", credit=1, request_id="slow")
            await s.next_submit()
            s.core.tokens("slow", *[5] * 102)
            s.pump()
            await many.read_until_ended(0)
            assert (many.errors[0].code, many.token_ids(0)) == (1, [5])
            assert "too slowly: 102 tokens" in many.errors[0].text
        assert s.core.cancelled == ["slow"]

    scenario(test, max_buffered_tokens=100)


def test_a_reader_that_gives_no_credit_for_too_long_loses_its_call() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", credit=1, request_id="slow")
            await many.start(1, text="<1>", credit=1, request_id="patient")
            for _ in range(2):
                await s.next_submit()
            s.core.tokens("slow", 5, 6)
            s.core.tokens("patient", 5)  # nothing of it waits
            s.pump()
            await many.read_until_ended(0)
            assert (many.errors[0].code, many.errors[0].text) == (1, "the client took nothing for 0.1 s")
            assert s.core.cancelled == ["slow"]
            s.core.end("patient", "length")
            s.pump()
            await many.read_until_ended(1)

    scenario(test, write_timeout_s=0.1)


def test_a_stream_whose_client_takes_nothing_is_ended() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", credit=2**31 - 1, request_id="a")
            await s.next_submit()
            while s.core.calls.empty():  # once the connection's windows are full, the write stands still
                s.core.tokens("a", *[5] * 1000)
                s.pump()
                await asyncio.sleep(0)
            assert s.core.calls.get_nowait() == ("cancel", "a")
            status, details = await many.status()
            assert (status, details) == ("CANCELLED", "the client took nothing for 0.1 s")

    scenario(test, max_buffered_tokens=1_000_000_000, write_timeout_s=0.1)


def test_steps_during_a_write_go_into_one_message() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", request_id="a")
            await s.next_submit()
            s.core.tokens("a", 1)
            s.pump()
            await many.read()
            for token_id in range(2, 7):
                s.core.tokens("a", token_id)
                s.pump()
            message = await many.read()
            assert (list(message.counts), list(message.token_ids)) == ([5], [2, 3, 4, 5, 6])

    scenario(test)


def test_half_closing_waits_for_the_open_calls() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", request_id="a")
            await many.grpc.done_writing()
            await s.next_submit()
            echo_and_pump(s, "a")
            assert (await many.status())[0] == "OK"
            assert many.is_complete(0)
        async with many_stream(s.address) as many:
            await many.grpc.done_writing()
            assert (await many.status())[0] == "OK"
        assert s.core.cancelled == []

    scenario(test)


def test_a_stream_that_goes_away_leaves_no_open_request() -> None:
    async def test(s: Serving) -> None:
        for _ in range(3):
            async with many_stream(s.address) as many:
                for number in range(20):
                    await many.start(number, text="<1>", n=1 + number % 2, temperature=1.0)
                names = [(await s.next_submit()).request_id for _ in range(30)]
                for name in names:
                    s.core.tokens(name, 5)
                s.core.end(names[0], "length")
                s.pump()
                await many.read_tokens(1, 1)
            while len(s.core.cancelled) < 29:
                await asyncio.sleep(0)
            await until_closed(s)
            assert names[0] not in s.core.cancelled
            s.core.cancelled.clear()
            while not s.core.calls.empty():
                s.core.calls.get_nowait()

    scenario(test)


def test_stopping_the_server_ends_calls_with_their_errors_and_then_the_stream() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many, many_stream(s.address) as idle:
            await many.start(0, text="<1>", request_id="a")
            await s.next_submit()
            await idle.start(0, text="words")
            await idle.read_until_ended(0)
            stopping = asyncio.create_task(s.server.stop(20.0))
            assert (await idle.status())[0] == "UNAVAILABLE"
            s.core.end("a", None, RequestFailed("shut down"))
            s.pump()
            assert await many.status() == ("UNAVAILABLE", "the deployment is draining")
            assert many.errors[0].text == "shut down"
            await stopping

    scenario(test)


def test_a_thousand_calls_on_one_stream() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:

            async def start() -> None:
                for number in range(1000):
                    await many.start(number, token_ids=[number % VOCAB_SIZE, 2, 3])

            starting = asyncio.create_task(start())
            await many.read_until_ended(999)
            await starting
            await many.read_until_ended(*range(1000))
            assert all(many.token_ids(number) == [number % VOCAB_SIZE, 2, 3] for number in range(1000))
        await until_closed(s)
        assert s.door.totals.ends["length"] == 1000

    scenario(test, ScriptedCore(echo))


class Endless:
    """A context whose client sends bad calls without an end, and takes one message."""

    def __init__(self) -> None:
        self.num_read, self.blocked = 0, asyncio.Event()
        self.written: list[pb.ManyResponse] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, initial_metadata: object) -> None: ...

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        self.num_read += 1
        return sent(start=pb.Start(call=self.num_read))

    async def write(self, message: pb.ManyResponse) -> None:
        self.written.append(message)
        if len(self.written) > 1:
            self.blocked.set()
            await asyncio.Event().wait()


def test_refusals_that_nobody_takes_do_not_fill_the_memory() -> None:
    async def test(s: Serving) -> None:
        context: Any = Endless()
        many = GrpcMany(s.door, RouterConfig(), context, lambda: None)
        running = asyncio.create_task(many.run(lambda begins: None))
        await context.blocked.wait()
        num_read = -1
        while context.num_read != num_read:
            num_read = context.num_read
            for _ in range(100):
                await asyncio.sleep(0)
        assert MAX_ERRORS <= num_read <= MAX_ERRORS + 10
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    scenario(test)


def test_a_call_that_fails_while_another_of_its_answers_has_just_finished_tells_both() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            await many.start(0, text="<1>", n=2, temperature=1.0)
            names = [(await s.next_submit()).request_id for _ in range(2)]
            s.core.tokens(names[0], 5)
            s.core.end(names[0], "length")
            s.core.tokens(names[1], 6)
            s.core.end(names[1], None, RequestFailed("3 attempts"))
            s.pump()
            await many.read_until_ended(0)
        await until_closed(s)
        assert {reason: count for reason, count in s.door.totals.ends.items() if count} == {"length": 1, "failed": 1}
        assert sum(s.door.totals.total.now.counts) == 1

    scenario(test)


class ClosingDoor:
    """As much of a FrontDoor as a call needs that is given up before it is open."""

    def __init__(self) -> None:
        self.closed: list[object] = []

    def close_call(self, call: object, error: RequestError | None) -> None:
        self.closed.append((call, error))


def test_what_a_call_opens_to_that_was_cancelled_meanwhile_is_closed() -> None:
    """The cancelling reaches the task that opens it only in the loop's next round."""
    door = ClosingDoor()
    calls = ManyCalls(cast(Any, door), lambda: 0.0, lambda: None)
    opened, refused = calls.start(0, 1), calls.start(1, 1)
    assert opened is not None and refused is not None
    calls.cancel(0)
    calls.cancel(1)
    calls.opened(opened, cast(Any, "the call"))
    calls.refused(refused, InvalidRequest("n", 0, "at least 1"))
    assert door.closed == [("the call", None)]
    assert (calls.num_open, calls.next_message()) == (0, None)
