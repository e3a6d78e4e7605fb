"""The clients of bench/router.py, in a process of their own: they print when they had each token, as JSON.

python -m bench.router_client PORT WAY ANSWERS TOKENS CONNECTIONS
"""

import asyncio
import json
import sys
import time

import grpc

from twopass.proto import twopass_pb2 as pb

Times = list[tuple[int, float]]
"""Each token of an answer, and the moment at which it was there."""


def asked(index: int, num_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[index + 1]), sampling=sampling)


async def generate(port: int, num_answers: int, num_tokens: int) -> list[Times]:
    async def one(index: int) -> Times:
        times: Times = []
        async for response in call(asked(index, num_tokens)):
            times += [(token, time.perf_counter()) for token in response.token_ids]
        return times

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            "/twopass.v1.Twopass/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        return await asyncio.gather(*(one(index) for index in range(num_answers)))


async def generate_many(port: int, num_answers: int, num_tokens: int) -> list[Times]:
    options = (("grpc.use_local_subchannel_pool", 1),)  # each connection may meet another door
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.stream_stream(
            "/twopass.v1.Twopass/GenerateMany", pb.ManyRequest.SerializeToString, pb.ManyResponse.FromString
        )()
        for index in range(num_answers):
            request = asked(index, num_tokens).SerializeToString()
            await call.write(pb.ManyRequest(start=pb.Start(call=index, request=request, credit=num_tokens)))
        await call.done_writing()
        times: Times = []
        async for message in call:
            now = time.perf_counter()
            assert not message.errors, message.errors
            in_full = [token for row in message.responses for token in row.response.token_ids]
            times += [(token, now) for token in (*message.token_ids, *in_full)]
        return [times]


async def sse(port: int, num_answers: int, num_tokens: int) -> list[Times]:
    """Reads no more of the HTTP than it has to: the server is what is measured."""

    async def one(index: int) -> Times:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        wanted = {"prompt": [index + 1], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(wanted).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        times: Times = []
        while b"[DONE]" not in (line := await reader.readline()):
            assert line, "the answer ends before [DONE]"
            if line.startswith(b"data: "):
                now, text = time.perf_counter(), json.loads(line[6:])["choices"][0]["text"]
                times += [(int(word.strip("<>")), now) for word in text.split()]
        writer.close()
        return times

    return await asyncio.gather(*(one(index) for index in range(num_answers)))


async def main(port: int, way: str, num_answers: int, num_tokens: int, num_connections: int) -> None:
    calls = {"generate": generate, "generate_many": generate_many, "sse": sse}[way]
    share = num_answers // num_connections
    streams = await asyncio.gather(*(calls(port, share, num_tokens) for _ in range(num_connections)))
    print(json.dumps([times for some in streams for times in some]))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
