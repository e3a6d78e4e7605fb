"""Measures what the router adds to a token's latency, from the arrival of an engine's `StepTokens` to the client, with
64 and with 512 answers at once: as a stream each (Generate), and all on one (GenerateMany).

    python -m bench.router_overhead [--json]

The real core, front door and gRPC server run in this process, and a client in another one. A timer plays one engine: it
hands in one `StepTokens` after the other, each with a token for every stream. For comparison the same messages go over
grpc.aio alone, as from a server without a router. Both processes read the same monotonic clock of this machine.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import numpy as np

from protocol.messages import Address, End, EngineRequest, Envelope, Hello, Message, StepTokens
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.frontdoor import FrontDoor, Model
from router.grpc_door import SERVICE, GrpcDoor
from router.listening import Listening
from router.router import Router
from router.tokenizer import NumberTokenizer
from twopass.proto import twopass_pb2 as pb

STEP_S = {64: 0.02, 512: 0.1}
"""The time between two steps, by the number of answers: so much that the slowest way has an idle moment in each."""
NUM_STEPS = {64: 200, 512: 50}
NUM_ROUNDS = 3
ENGINE = Address("decode-0", 2)

CLIENT = """
import asyncio, json, sys, time
import grpc
from twopass.proto import twopass_pb2 as pb
port, method, answers, tokens = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def asked(index):
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[index + 1]), sampling=sampling)
async def one(generate, index):
    times = []
    async for response in generate(asked(index)):
        times += [(token, time.perf_counter()) for token in response.token_ids]
    return times
async def many(generate_many):
    call = generate_many()
    for index in range(answers):
        start = pb.Start(call=index, request=asked(index).SerializeToString(), credit=tokens)
        await call.write(pb.ManyRequest(start=start))
    await call.done_writing()
    times = []
    async for message in call:
        now = time.perf_counter()
        in_full = [token for response in message.responses for token in response.response.token_ids]
        times += [(token, now) for token in (*message.token_ids, *in_full)]
    return [times]
async def main():
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        if method == "GenerateMany":
            call = channel.stream_stream("/twopass.v1.Twopass/GenerateMany", pb.ManyRequest.SerializeToString,
                                         pb.ManyResponse.FromString)
            print(json.dumps(await many(call)))
        else:
            call = channel.unary_stream("/twopass.v1.Twopass/Generate", pb.GenerateRequest.SerializeToString,
                                        pb.GenerateResponse.FromString)
            print(json.dumps(await asyncio.gather(*(one(call, index) for index in range(answers)))))
asyncio.run(main())
"""


class Figures(NamedTuple):
    """Milliseconds from the moment a step's tokens are handed in until the client has each of them, and microseconds of
    this process's CPU time per token.
    """

    p50_ms: float
    p99_ms: float
    cpu_us: float


async def measure_router(method: str, num_answers: int) -> Figures:
    """Measures the whole router, whose client uses `method`."""
    dispatched: dict[int, int] = {}

    def send(address: Address, message: Message) -> None:
        if isinstance(message, EngineRequest):
            dispatched[message.request_number] = message.key.attempt

    config = RouterConfig(grpc_port=0, metrics_port=0, replica_timeout_s=600)  # the played engine reports nothing
    router = Router(config, address=Address("router", 1), clock=time.perf_counter, seed=1)
    loop = CoreLoop(router, config, send=send, clock=time.perf_counter)
    door = FrontDoor(
        OwnLink(loop),
        NumberTokenizer(32_000),
        config,
        Model("played", 32_000),
        clock=time.perf_counter,
        totals=loop.doors.totals,
    )
    server = Listening([GrpcDoor(door, config)], config.tick_interval_s, loop)
    (port,) = await server.start()
    router.replica_started(ENGINE)
    hello = Hello(
        role="decode",
        layout_fingerprint=b"",
        block_size=16,
        num_blocks=999_999,
        max_num_seqs=1024,
        max_model_len=2048,
        max_prompt_tokens=2047,
        endpoint=b"",
    )
    loop.deliver(Envelope(ENGINE, router.address, 0, hello))
    ones, num_steps = np.ones(num_answers, np.int32), NUM_STEPS[num_answers]
    steps: list[StepTokens] = []

    def play() -> None:
        """The engine's messages are made before the first one is handed in: only the router is measured."""
        numbers = np.array(sorted(dispatched), np.int64)
        ends = tuple(End(int(number), 1, "finished", "length") for number in numbers)
        for step in range(num_steps):
            steps.append(
                StepTokens(
                    router_epoch=1,
                    request_numbers=numbers,
                    attempts=ones,
                    offsets=ones * step,
                    counts=ones,
                    token_ids=ones * step,
                    ends=ends if step == num_steps - 1 else (),
                )
            )

    def num_open() -> int:
        if len(dispatched) == num_answers and not steps:
            play()
        return len(dispatched)

    def hand_in(step: int) -> None:
        loop.deliver(Envelope(ENGINE, router.address, step + 1, steps[step]))

    figures = await _measure(port, method, num_answers, num_open, hand_in)
    await server.stop(0.1)
    await door.close()
    return figures


async def measure_bare(num_answers: int) -> Figures:
    """Measures grpc.aio alone: it writes the same messages, and each stream waits for its turn."""
    turns: list[asyncio.Event] = []
    num_steps = NUM_STEPS[num_answers]

    async def generate(request: bytes, context: Any) -> None:
        turns.append(turn := asyncio.Event())
        for step in range(num_steps):
            await turn.wait()
            turn.clear()
            piece = pb.GenerateResponse(text=f"{step} ", token_ids=[step])
            if step == num_steps - 1:
                piece.finish_reason = pb.FINISH_REASON_LENGTH
                piece.usage.completion_tokens = num_steps
            await context.write(piece)

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(generate, response_serializer=pb.GenerateResponse.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def hand_in(step: int) -> None:
        for turn in turns:
            turn.set()

    figures = await _measure(port, "Generate", num_answers, lambda: len(turns), hand_in)
    await server.stop(0.1)
    return figures


async def _measure(
    port: int, method: str, num_answers: int, num_open: Callable[[], int], hand_in: Callable[[int], None]
) -> Figures:
    """Starts the client, waits for its calls, then hands in one step after the other."""
    arguments = [str(port), method, str(num_answers), str(NUM_STEPS[num_answers])]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, text=True)
    reading = asyncio.create_task(asyncio.to_thread(client.communicate))
    while num_open() < num_answers:
        await asyncio.sleep(0.01)
    handed_in_at, cpu_s = [], time.process_time()
    for step in range(NUM_STEPS[num_answers]):
        handed_in_at.append(time.perf_counter())
        hand_in(step)
        await asyncio.sleep(STEP_S[num_answers])
    cpu_s = time.process_time() - cpu_s
    streams = json.loads((await reading)[0])
    added = np.array([at - handed_in_at[token] for stream in streams for token, at in stream]) * 1e3
    assert len(added) == num_answers * NUM_STEPS[num_answers]
    return Figures(float(np.median(added)), float(np.percentile(added, 99)), cpu_s / len(added) * 1e6)


async def measure(num_answers: int) -> dict[str, Any]:
    """Measures all ways in turns, so that a change of the machine's speed affects all, and takes medians of
    `NUM_ROUNDS`. `added` is what the router adds to plain gRPC when each answer has a stream.
    """
    rounds = [
        (
            await measure_router("GenerateMany", num_answers),
            await measure_router("Generate", num_answers),
            await measure_bare(num_answers),
        )
        for _ in range(NUM_ROUNDS)
    ]
    many, router, bare = (Figures(*np.median(np.array(way), axis=0).tolist()) for way in zip(*rounds, strict=True))
    added = Figures(*(router_figure - bare_figure for router_figure, bare_figure in zip(router, bare, strict=True)))
    return {
        "answers": num_answers,
        "steps": NUM_STEPS[num_answers],
        "generate_many": many._asdict(),
        "generate": router._asdict(),
        "bare_grpc": bare._asdict(),
        "added": added._asdict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Latency that the router adds to each token, and what gRPC itself takes."
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for num_answers in STEP_S:
        result = asyncio.run(measure(num_answers))
        if arguments.json:
            print(json.dumps(result))
            continue
        print(f"{num_answers} answers; from the engine's message to the client, per token")
        for name in ("generate_many", "generate", "bare_grpc", "added"):
            figures = Figures(**result[name])
            print(
                f"{name:13} {figures.p50_ms:6.2f} ms p50  {figures.p99_ms:6.2f} ms p99  {figures.cpu_us:6.1f} us of "
                "the router's CPU"
            )


if __name__ == "__main__":
    main()
