"""A call over GenerateMany says what the same call over Generate says, whatever it asks for and however it ends."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest

from protocol.errors import Overloaded, RequestError, RequestFailed
from protocol.messages import FinishReason, TokenLogprobs
from router.grpc_door import SERVICE
from router.tokenizer import NumberTokenizer
from tests.router.many_stream import generate_request, many_stream
from tests.router.scripted_core import VOCAB_SIZE, Serving, scenario
from tests.router.test_tracing import Recorded
from twopass.proto import twopass_pb2 as pb

STEPS = [[5], [6, 7], [200, 201], [202], [8, 9, 10], [203], [11]]
"""Tokens of an answer, step by step. 200 to 202 are the bytes of one character, 203 is none."""


class Told(NamedTuple):
    """All that a client learns of a call but the times and how pieces were cut."""

    texts: dict[int, str]
    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[bytes]]
    reasons: dict[int, int]
    prompt_tokens: int
    request_id: str
    usage: bytes
    stages: set[str]
    error: tuple[int, str, str, float] | None


class OddTokenizer(NumberTokenizer):
    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        odd = {200: b"\xe2", 201: b"\x82", 202: b"\xac", 203: b"\xff"}
        self.token_bytes = [odd.get(token_id, text) for token_id, text in enumerate(self.token_bytes)]


def told(pieces: list[pb.GenerateResponse], error: tuple[int, str, str, float] | None) -> Told:
    indexes = sorted({piece.index for piece in pieces})
    of = {index: [piece for piece in pieces if piece.index == index] for index in indexes}
    first = pieces[0] if pieces else pb.GenerateResponse()
    last = pieces[-1] if pieces else first
    assert all(not piece.HasField("request_id") for piece in pieces[1:])
    assert all(not piece.HasField("usage") and not piece.HasField("timing") for piece in pieces[:-1])
    assert all(not piece.HasField("finish_reason") for index in indexes for piece in of[index][:-1])
    return Told(
        {index: "".join(piece.text for piece in of[index]) for index in indexes},
        {index: [token_id for piece in of[index] for token_id in piece.token_ids] for index in indexes},
        {index: [values.SerializeToString() for piece in of[index] for values in piece.logprobs] for index in indexes},
        {index: of[index][-1].finish_reason for index in indexes},
        first.prompt_tokens,
        first.request_id,
        last.usage.SerializeToString(),
        set(last.timing.stages),
        error,
    )


async def by_generate(s: Serving, request: bytes) -> Told:
    pieces: list[pb.GenerateResponse] = []
    async with grpc.aio.insecure_channel(s.address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Generate")(request)
        try:
            async for data in call:
                pieces.append(pb.GenerateResponse.FromString(data))
        except grpc.RpcError as error:
            metadata = {key: value for key, value in error.trailing_metadata() or ()}
            field, retry = metadata.get("invalid-field", ""), float(metadata.get("retry-after-s", 0))
            return told(pieces, (error.code().value[0], error.details() or "", field, retry))
    return told(pieces, None)


async def by_many(s: Serving, request: bytes) -> Told:
    async with many_stream(s.address) as many:
        await many.start_bytes(0, request)
        await many.read_until_ended(0)
        error = many.errors.get(0)
        return told(
            many.pieces.get(0, []),
            None if error is None else (error.code, error.text, error.invalid_field, error.retry_after_s),
        )


class End(NamedTuple):
    """How the core ends each answer after its `num_steps` first steps."""

    num_steps: int = len(STEPS)
    reason: FinishReason | None = "length"
    error: RequestError | None = None
    abort: bool = False


async def play(s: Serving, count: int, logprobs: bool, end: End) -> None:
    """Plays the core's part for one call of `count` answers."""
    names = [(await s.next_submit()).request_id for _ in range(count)]
    open_names = dict.fromkeys(names)
    for step in STEPS[: end.num_steps]:
        while not s.core.calls.empty():
            _, gone = s.core.calls.get_nowait()
            open_names.pop(gone, None)
        for name in open_names:
            values = tuple(TokenLogprobs(-token_id / 8, (token_id, 1), (-0.5, -2.0)) for token_id in step)
            s.core.tokens(name, *step, logprobs=values if logprobs else ())
        s.pump()
        for _ in range(20):
            await asyncio.sleep(0)
    while not s.core.calls.empty():
        _, gone = s.core.calls.get_nowait()
        open_names.pop(gone, None)
    if end.abort:
        await s.door.abort("mine")
    for name in open_names:
        if name not in s.core.cancelled:
            s.core.end(name, end.reason, end.error)
            s.pump()
    while s.door.num_open:
        await asyncio.sleep(0)
    while not s.core.calls.empty():
        s.core.calls.get_nowait()


def cases() -> Iterator[tuple[dict[str, Any], End]]:
    for options in (
        {},
        {"logprobs": 0},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "logprobs": 1},
        {"stop": ["<7>"]},
        {"stop": ["€"], "include_stop_str_in_output": True},
        {"stop": ["> <6", "<9> <10"], "n": 2, "temperature": 1.0},
        {"stop": ["<11> <12>"], "logprobs": 1},
        {"stop": ["<6>"], "min_tokens": 4},
    ):
        yield options, End()
        yield options, End(4, None, RequestFailed("3 attempts"))
        yield options, End(3, abort=True)
    yield {}, End(0)
    yield {}, End(4, "stop")
    yield {}, End(0, None, Overloaded("full", retry_after_s=2.5))
    yield {}, End(1, None, RequestFailed("€" * 2000))


@pytest.mark.parametrize(("options", "end"), list(cases()), ids=str)
def test_both_say_the_same(options: dict[str, Any], end: End) -> None:
    recorded = Recorded()

    async def test(s: Serving) -> None:
        request = generate_request(text="<1> <2>", request_id="mine", **options).SerializeToString()
        answers, counts = [], []
        for way in (by_generate, by_many):
            before = dict(s.door.totals.ends)
            answering = asyncio.create_task(way(s, request))
            await play(s, options.get("n", 1), "logprobs" in options, end)
            answers.append(await answering)
            counts.append({word: count - before[word] for word, count in s.door.totals.ends.items()})
        if options.get("n", 1) > 1 and answers[0].error:  # what the other answers had said by then is chance
            answers = [answer._replace(texts={}, token_ids={}, logprobs={}, reasons={}) for answer in answers]
        assert answers[0] == answers[1]
        assert counts[0] == counts[1]
        assert recorded.codes[0] == recorded.codes[1]
        if end.error is None and not end.abort:
            assert answers[0].reasons

    scenario(test, tokenizer=OddTokenizer(), tracing=recorded.tracing)


BAD: list[dict[str, Any]] = [
    {},
    {"text": "words"},
    {"text": "<1>", "temperature": -0.1},
    {"text": "<1>", "n": 2},
    {"text": "<1>", "stop": ["x"] * 17},
    {"token_ids": [VOCAB_SIZE]},
    {"text": "<1>", "request_id": "a b"},
    {"text": "é" * 3_000_000},
]


def test_both_refuse_in_the_same_words() -> None:
    async def test(s: Serving) -> None:
        async with many_stream(s.address) as many:
            for number, fields in enumerate(BAD):
                request = generate_request(**fields).SerializeToString()
                expected = await by_generate(s, request)
                await many.start_bytes(number, request)
                await many.read_until_ended(number)
                error = many.errors[number]
                assert expected.error == (error.code, error.text, error.invalid_field, error.retry_after_s)
        assert s.core.calls.empty()
        assert s.door.totals.refusals["invalid"] == 2 * sum(fields.get("n", 1) for fields in BAD)

    scenario(test)
