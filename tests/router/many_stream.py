"""A GenerateMany stream as a client sees it, message by message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from router.grpc_door import SERVICE
from twopass.proto import twopass_pb2 as pb

MUCH = 1_000_000


class Many:
    """`read` sorts what a message says by call: `pieces` in their order, and `errors`."""

    def __init__(self, call: Any) -> None:
        self.grpc = call
        self.pieces: dict[int, list[pb.GenerateResponse]] = {}
        self.errors: dict[int, pb.CallError] = {}

    async def send(self, **kind: Any) -> None:
        await self.grpc.write(pb.ManyRequest(**kind).SerializeToString())

    async def start(self, number: int, *, credit: int = MUCH, timeout_s: float | None = None, **request: Any) -> None:
        """`request`: fields of a GenerateRequest, and those of its sampling parameters."""
        await self.start_bytes(number, generate_request(**request).SerializeToString(), credit, timeout_s)

    async def start_bytes(
        self, number: int, request: bytes, credit: int = MUCH, timeout_s: float | None = None, **more: Any
    ) -> None:
        await self.send(start=pb.Start(call=number, request=request, credit=credit, timeout_s=timeout_s, **more))

    async def cancel(self, number: int) -> None:
        await self.send(cancel=pb.Cancel(call=number))

    async def credit(self, number: int, num_tokens: int) -> None:
        await self.send(credit=pb.Credit(call=number, num_tokens=num_tokens))

    async def read(self) -> pb.ManyResponse:
        """Raises EOFError at the end of the stream."""
        data = await self.grpc.read()
        if data is grpc.aio.EOF:
            raise EOFError
        message = pb.ManyResponse.FromString(data)
        for number, piece in rows(message):
            self.pieces.setdefault(number, []).append(piece)
        for error in message.errors:
            assert error.call not in self.errors
            self.errors[error.call] = error
        return message

    async def read_until_ended(self, *numbers: int) -> None:
        while not all(number in self.errors or self.is_complete(number) for number in numbers):
            await self.read()

    async def read_tokens(self, number: int, num_tokens: int) -> None:
        while len(self.token_ids(number)) < num_tokens:
            await self.read()

    async def status(self) -> tuple[str, str]:
        """Reads to the end of the stream. Returns the name of its status and its text."""
        try:
            while True:
                await self.read()
        except (EOFError, grpc.RpcError, asyncio.CancelledError):
            return (await self.grpc.code()).name, await self.grpc.details()

    def is_complete(self, number: int) -> bool:
        return number in self.pieces and self.pieces[number][-1].HasField("usage")

    def token_ids(self, number: int) -> list[int]:
        return [token_id for piece in self.pieces.get(number, ()) for token_id in piece.token_ids]

    def text(self, number: int) -> str:
        return "".join(piece.text for piece in self.pieces[number])


def generate_request(**fields: Any) -> pb.GenerateRequest:
    known = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    own = {name: value for name, value in fields.items() if name in known}
    sampling = {name: value for name, value in fields.items() if name not in known}
    if "token_ids" in own:
        own["token_ids"] = pb.TokenIds(ids=own["token_ids"])
    return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **own)


def rows(message: pb.ManyResponse) -> list[tuple[int, pb.GenerateResponse]]:
    """Returns the pieces of a message with the numbers of their calls."""
    found, start = [], 0
    for row, number in enumerate(message.calls):
        end = start + (message.counts[row] if message.counts else 1)
        index = message.indexes[row] if message.indexes else 0
        piece = pb.GenerateResponse(text=message.texts[row], token_ids=message.token_ids[start:end], index=index)
        found.append((number, piece))
        start = end
    assert start == len(message.token_ids)
    assert len(message.texts) == len(message.calls)
    in_full = [(response.call, response.response) for response in message.responses]
    assert not {number for number, _ in found} & {number for number, _ in in_full}
    return found + in_full


@asynccontextmanager
async def many_stream(address: str, **metadata: str) -> AsyncIterator[Many]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/GenerateMany")(metadata=tuple(metadata.items()))
        try:
            yield Many(call)
        finally:
            call.cancel()
