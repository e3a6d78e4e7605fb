"""Measures what a token costs between an engine's message and the client: CPU time and latency, with 64 and with 512
answers at once.

    python -m bench.router [--json]

The real core, front door and servers run in this process, and clients in another one. A timer plays one engine: it
hands in one `StepTokens` after the other, each with a token for every answer. The answers go

- generate: as a gRPC stream each
- generate_many: over one gRPC stream
- sse: as events of an HTTP response each, in OpenAI's dialect
- bare_grpc, bare_asgi: in messages of the same size, over grpc.aio and over an ASGI application without a router
- core: to a door in another process; what the core does for it, with the frame for the door's socket

CPU time is that of this process per token. Then one and two doors get processes of their own, as with `router.doors`,
and clients over eight connections: `tokens/s` is how many tokens each could write in a second of CPU time. All ways
take turns, and medians count. Both processes read the same monotonic clock.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np
from prometheus_client.registry import CollectorRegistry
from starlette.types import Receive, Scope, Send

from bench.process import cpu_kind, cpu_s
from cluster.reserved_port import ReservedPort
from protocol.messages import Address, End, EngineRequest, Envelope, Hello, Message, SamplingParams, StepTokens
from router.admission import ClientRequest
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.door_messages import Batch, Submit, Taken
from router.door_socket import CoreSocket, FarLink, socket_name
from router.door_wire import encode_batch
from router.frontdoor import FrontDoor, Model
from router.grpc_door import SERVICE, GrpcDoor
from router.http_server import HttpServer
from router.listeners import Listeners
from router.listening import Listening
from router.metrics_totals import DoorTotals
from router.router import Router
from router.tokenizer import NumberTokenizer
from twopass.proto import twopass_pb2 as pb

STEP_S = {64: 0.02, 512: 0.1}
"""The time between two steps, by the number of answers: so much that the slowest way has an idle moment in each."""
NUM_STEPS = {64: 100, 512: 20}
NUM_ROUNDS = 2
VOCAB_SIZE = 32_000
CORE, ENGINE, FAR_DOOR = Address("router", 1), Address("decode-0", 2), Address("door-0", 3)
HELLO = Hello(
    role="decode", layout_fingerprint=b"", block_size=16, num_blocks=999_999, max_num_seqs=1024, max_model_len=2048,
    max_prompt_tokens=2047, endpoint=b"",
)  # fmt: skip


class Figures(NamedTuple):
    """Milliseconds from the moment a step's tokens are handed in until the client has each of them, and microseconds of
    this process's CPU time per token.
    """

    p50_ms: float
    p99_ms: float
    cpu_us: float


class Played:
    """A core, and an engine that gives each of its answers a token in every step."""

    def __init__(self, num_answers: int, config: RouterConfig) -> None:
        self.config, self._num_answers, self._num_steps = config, num_answers, NUM_STEPS[num_answers]
        self._numbers: list[int] = []
        self._steps: list[StepTokens] = []
        self.router = Router(config, address=CORE, clock=time.perf_counter, seed=1)
        self.loop = CoreLoop(self.router, config, send=self._take, clock=time.perf_counter)
        self.router.replica_started(ENGINE)
        self.loop.deliver(Envelope(ENGINE, CORE, 0, HELLO))

    def num_open(self) -> int:
        if len(self._numbers) == self._num_answers and not self._steps:
            self._make_steps()
        return len(self._numbers)

    def hand_in(self, step: int) -> None:
        self.loop.deliver(Envelope(ENGINE, CORE, step + 1, self._steps[step]))

    def _take(self, address: Address, message: Message) -> None:
        if isinstance(message, EngineRequest):
            self._numbers.append(message.request_number)

    def _make_steps(self) -> None:
        """Before the first one is handed in: only the router is measured."""
        numbers, ones = np.array(sorted(self._numbers), np.int64), np.ones(self._num_answers, np.int32)
        ends = tuple(End(int(number), 1, "finished", "length") for number in numbers)
        for step in range(self._num_steps):
            self._steps.append(
                StepTokens(
                    router_epoch=1, request_numbers=numbers, attempts=ones, offsets=ones * step, counts=ones,
                    token_ids=ones * step, ends=ends if step == self._num_steps - 1 else (),
                )
            )  # fmt: skip


def played_config(**knobs: Any) -> RouterConfig:
    return RouterConfig(metrics_port=0, replica_timeout_s=600, **knobs)  # the played engine reports nothing


def front_door(link: Any, config: RouterConfig, totals: DoorTotals) -> FrontDoor:
    return FrontDoor(
        link, NumberTokenizer(VOCAB_SIZE), config, Model("played", VOCAB_SIZE), clock=time.perf_counter, totals=totals
    )


async def measure_router(way: str, num_answers: int) -> Figures:
    """Measures the whole router, whose clients go this way."""
    config = played_config(grpc_port=0, http_port=0)
    played = Played(num_answers, config)
    door = front_door(OwnLink(played.loop), config, played.loop.doors.totals)
    listeners = Listeners(config).of_door(door, CollectorRegistry())
    server = Listening(list(listeners.values()), config.tick_interval_s, played.loop)
    ports = dict(zip(listeners, await server.start(), strict=True))
    port = ports["http_port" if way == "sse" else "grpc_port"]
    figures = await _measure(port, way, num_answers, played.num_open, played.hand_in)
    await server.stop(0.1)
    await door.close()
    return figures


async def measure_bare_grpc(num_answers: int) -> Figures:
    """Measures grpc.aio alone: it writes the same messages, and each stream waits for its turn."""
    turns: list[asyncio.Semaphore] = []

    async def generate(request: bytes, context: Any) -> None:
        async for step in _turns(turns, num_answers):
            piece = pb.GenerateResponse(text=f"<{step}> ", token_ids=[step])
            if step == NUM_STEPS[num_answers] - 1:
                piece.finish_reason = pb.FINISH_REASON_LENGTH
                piece.usage.completion_tokens = NUM_STEPS[num_answers]
            await context.write(piece)

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(generate, response_serializer=pb.GenerateResponse.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    figures = await _measure(port, "generate", num_answers, lambda: len(turns), lambda step: _wake(turns))
    await server.stop(0.1)
    return figures


async def measure_bare_asgi(num_answers: int) -> Figures:
    """Measures uvicorn with an application that writes events as long as those of the door."""
    turns: list[asyncio.Semaphore] = []
    frame = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1_700_000_000, "model": "played"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            continue
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for step in _turns(turns, num_answers):
            choice = {"index": 0, "text": f"<{step}> ", "logprobs": None, "finish_reason": None}
            event = json.dumps({**frame, "choices": [choice]})
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    server = HttpServer(app, "http", "127.0.0.1", 0, read_timeout_s=30.0, write_timeout_s=30.0)
    port = await server.start()
    figures = await _measure(port, "sse", num_answers, lambda: len(turns), lambda step: _wake(turns))
    await server.stop(0.1)
    return figures


async def _turns(turns: list[asyncio.Semaphore], num_answers: int) -> AsyncIterator[int]:
    """Each step of a stream. Steps that come while it still writes an earlier one are counted and not lost."""
    turns.append(turn := asyncio.Semaphore(0))
    for step in range(NUM_STEPS[num_answers]):
        await turn.acquire()
        yield step


def _wake(turns: list[asyncio.Semaphore]) -> None:
    for turn in turns:
        turn.release()


def core_us(num_answers: int) -> float:
    """Microseconds of the core's CPU time per token, for a door in another process, which acknowledges each batch."""
    played = Played(num_answers, played_config(doors=1))
    loop, bytes_sent = played.loop, 0

    def receive(batch: Batch) -> None:
        nonlocal bytes_sent
        bytes_sent += len(encode_batch(batch))
        loop.take(FAR_DOOR, Taken(batch.seq))

    loop.connect(FAR_DOOR, receive)
    for index in range(num_answers):
        sampling = SamplingParams(ignore_eos=True)
        request = ClientRequest(
            request_id=str(index),
            prompt_token_ids=np.array([index + 1], np.int32),
            max_tokens=NUM_STEPS[num_answers],
            sampling=sampling,
        )
        loop.take(FAR_DOOR, Submit(index, str(index), (request,)))
    assert played.num_open() == num_answers
    begin = time.process_time()
    for step in range(NUM_STEPS[num_answers]):
        played.hand_in(step)
    assert bytes_sent
    return (time.process_time() - begin) / (num_answers * NUM_STEPS[num_answers]) * 1e6


async def measure_doors(num_doors: int, num_answers: int) -> float:
    """Tokens that a door could write in a second of CPU time; the mean over the doors."""
    prefix = f"twopass-bench-{os.getpid()}-{num_doors}-"
    with ReservedPort("grpc_port", "127.0.0.1", 0) as reserved:
        played = Played(num_answers, played_config(grpc_port=reserved.port, doors=num_doors))
        socket = CoreSocket(played.loop, socket_name(prefix, CORE))
        await socket.start()
        running = asyncio.gather(socket.run(), played.loop.run())
        commands = [(f"door-{i}", prefix, str(reserved.port)) for i in range(num_doors)]
        doors = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.router", "--door", *command), stdin=asyncio.subprocess.PIPE
            )
            for command in commands
        ]
        while len(socket.doors) < num_doors:
            await asyncio.sleep(0.01)
        used = partial(sum_of, cpu_s, [door.pid for door in doors])
        figures = await _measure(
            reserved.port, "generate_many", num_answers, played.num_open, played.hand_in, connections=8, used=used
        )
        for door in doors:
            await door.communicate(b"")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await socket.stop()
    return 1e6 / figures.cpu_us


def sum_of(of_one: Callable[[int], float], pids: list[int]) -> float:
    return sum(map(of_one, pids))


async def be_door(name: str, prefix: str, port: int) -> None:
    """A door's process, until its standard input ends."""
    config = played_config(grpc_port=port, doors=1)
    link = FarLink(name, prefix)
    door = front_door(link, config, DoorTotals())
    server = Listening([GrpcDoor(door, config)], config.tick_interval_s)
    await server.start()
    running = asyncio.gather(server.wait(), link.run())
    link.core_up(CORE)
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0.1)
    await door.close()


async def _measure(
    port: int,
    way: str,
    num_answers: int,
    num_open: Callable[[], int],
    hand_in: Callable[[int], None],
    *,
    connections: int = 1,
    used: Callable[[], float] = time.process_time,
) -> Figures:
    """Starts the clients, waits for their calls, then hands in one step after the other. `used`: seconds of CPU time
    that whoever is measured has used.
    """
    num_steps = NUM_STEPS[num_answers]
    arguments = ("-m", "bench.router_client", str(port), way, str(num_answers), str(num_steps), str(connections))
    clients = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    reading = asyncio.create_task(clients.communicate())
    while num_open() < num_answers:
        await asyncio.sleep(0.01)
    handed_in_at, before_s = [], used()
    for step in range(num_steps):
        handed_in_at.append(time.perf_counter())
        hand_in(step)
        await asyncio.sleep(STEP_S[num_answers])
    used_s = used() - before_s
    streams = json.loads((await reading)[0])
    added = np.array([at - handed_in_at[token] for stream in streams for token, at in stream]) * 1e3
    assert len(added) == num_answers * num_steps
    return Figures(float(np.median(added)), float(np.percentile(added, 99)), used_s / len(added) * 1e6)


WAYS: dict[str, Callable[[int], Awaitable[Figures]]] = {
    **{way: partial(measure_router, way) for way in ("generate", "generate_many", "sse")},
    "bare_grpc": measure_bare_grpc,
    "bare_asgi": measure_bare_asgi,
}


async def measure(num_answers: int) -> dict[str, Any]:
    """The medians of NUM_ROUNDS, in each of which all ways take their turns."""
    rounds: dict[str, list[Figures]] = {way: [] for way in WAYS}
    core = []
    for _ in range(NUM_ROUNDS):
        for way, measure_way in WAYS.items():
            rounds[way].append(await measure_way(num_answers))
        core.append(core_us(num_answers))
    medians = {way: Figures(*np.median(np.array(own), axis=0).tolist()) for way, own in rounds.items()}
    return {
        "cpu": cpu_kind(),
        "answers": num_answers,
        "steps": NUM_STEPS[num_answers],
        "ways": {way: figures._asdict() for way, figures in medians.items()},
        "core_us": float(np.median(core)),
        "sse_to_bare_asgi": medians["sse"].cpu_us / medians["bare_asgi"].cpu_us,
        "generate_to_bare_grpc": medians["generate"].cpu_us / medians["bare_grpc"].cpu_us,
    }


def show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    print(f"{result['answers']} answers, {result['cpu']}; from the engine's message to the client, per token")
    for way, figures in result["ways"].items():
        p50_ms, p99_ms, cpu_us = figures.values()
        print(f"{way:13} {p50_ms:6.2f} ms p50  {p99_ms:6.2f} ms p99  {cpu_us:6.1f} us of the router's CPU")
    print(f"core          {result['core_us']:37.1f} us of its process, doors apart")
    print(
        f"sse / bare_asgi {result['sse_to_bare_asgi']:.2f}, generate / bare_grpc {result['generate_to_bare_grpc']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a token costs between an engine's message and the client, by the way it goes."
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--door", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.door:
        name, prefix, port = arguments.door
        asyncio.run(be_door(name, prefix, int(port)))
        return
    for num_answers in STEP_S:
        result = asyncio.run(measure(num_answers))
        show(result, as_json=arguments.json)
    per_door = {num: asyncio.run(measure_doors(num, 512)) for num in (1, 2)}
    if arguments.json:
        print(json.dumps({"answers": 512, "tokens_per_cpu_second_of_a_door": per_door}))
    else:
        print(", ".join(f"{num} doors: {speed:,.0f} tokens/s each" for num, speed in per_door.items()))


if __name__ == "__main__":
    main()
