"""Keeps many streams open for a long time over both doors of one router. None may fail, and memory must be flat.

    python -m bench.streams [--streams 500] [--seconds 120] [--step-s 0.2] [--json]

The real core, front door, gRPC and HTTP servers run in this process, and a timer plays the engine: in each step every
open request gets its next token. Clients are in another process, half of them on each door. Each has one answer after
the other, checks every token, and leaves every tenth answer in the middle. After a warm-up of a quarter of the time,
the largest memory of the router's process may rise by `MAX_GROWTH_BYTES`. If it rises further, or an answer fails, the
exit code is 1.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from prometheus_client.registry import CollectorRegistry

from bench.process import memory_bytes
from protocol.messages import (
    AbortRequest,
    Address,
    End,
    EngineRequest,
    Envelope,
    Hello,
    Message,
    RequestKey,
    StepTokens,
)
from router.config import RouterConfig
from router.core_loop import CoreLoop, OwnLink
from router.frontdoor import FrontDoor, Model
from router.listeners import Listeners
from router.listening import Listening
from router.router import Router
from router.tokenizer import NumberTokenizer
from twopass import AsyncClient

LENGTHS = (1, 20, 60)
"""Tokens of an answer, drawn evenly."""
VOCAB_SIZE = 32_000
STREAMS_PER_CLIENT = 25
"""Answers that share a connection of gRPC."""
SETTLE_S = 60.0
"""How long after the given time the last answers may take to end."""
MAX_GROWTH_BYTES = 16 * 1024**2
ENGINE = Address("decode-0", 2)


@dataclass(frozen=True, slots=True)
class Report:
    streams: int
    seconds: float
    ends: dict[str, int]
    """Number of answers by door and end: complete or left."""
    failures: list[str]
    most_open: int
    """Requests that the engine had at once."""
    open_at_the_end: int
    warm_bytes: int
    """The largest memory of the router's process until the warm-up ended, and after it."""
    most_bytes: int

    def problems(self) -> list[str]:
        """One sentence each."""
        found = [f"failed: {failure}" for failure in self.failures]
        if self.open_at_the_end:
            found.append(f"{self.open_at_the_end} requests are still open")
        if (growth := self.most_bytes - self.warm_bytes) > MAX_GROWTH_BYTES:
            found.append(f"grown by {growth / 2**20:.1f} MiB, at most {MAX_GROWTH_BYTES / 2**20:g} are allowed")
        return found


class PlayedEngine:
    """Gives every request its next token in each step: the first token of its prompt, plus the token's index."""

    def __init__(self) -> None:
        self._open: dict[RequestKey, tuple[EngineRequest, int]] = {}
        """Each request, and the index of its next token."""
        self._ended: list[End] = []
        self.most_open = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take(self, message: Message) -> None:
        match message:
            case EngineRequest():
                self._open[message.key] = (message, message.offset)
                self.most_open = max(self.most_open, len(self._open))
            case AbortRequest(key=key) if key in self._open:
                request, _ = self._open.pop(key)
                self._ended.append(End(request.request_number, key.attempt, "aborted"))

    def step(self) -> StepTokens:
        rows = [(request, index) for request, index in self._open.values()]
        ends, self._ended = self._ended, []
        for request, index in rows:
            if index + 1 == request.max_tokens:
                del self._open[request.key]
                ends.append(End(request.request_number, request.key.attempt, "finished", "length"))
            else:
                self._open[request.key] = (request, index + 1)
        return StepTokens(
            router_epoch=1,
            request_numbers=np.array([request.request_number for request, _ in rows], np.int64),
            attempts=np.array([request.key.attempt for request, _ in rows], np.int32),
            offsets=np.array([index for _, index in rows], np.int32),
            counts=np.ones(len(rows), np.int32),
            token_ids=np.array([int(r.prompt_token_ids[0]) + index for r, index in rows], np.int32),
            ends=tuple(ends),
        )


class Client:
    """One of those that ask, in their own process. `one` returns how its answer ended, or raises what it met."""

    def __init__(self, http_port: int, grpc: AsyncClient | None, draw: random.Random) -> None:
        self._http_port, self._grpc, self._draw = http_port, grpc, draw

    async def until(self, at: float, ends: Counter[str], failures: list[str]) -> None:
        door = "HTTP" if self._grpc is None else "gRPC"
        while time.monotonic() < at:
            try:
                ends[f"{door} {await self.one()}"] += 1
            except Exception as error:  # noqa: BLE001  whatever it is, the report says it
                failures.append(f"{door}: {type(error).__name__}: {error}"[:300])
                return

    async def one(self) -> str:
        draw = self._draw
        first, num_tokens, got = draw.randrange(VOCAB_SIZE // 2), draw.choice(LENGTHS), list[int]()
        leave_at = draw.randrange(num_tokens) if draw.random() < 0.1 else num_tokens
        if self._grpc is None:
            await self._over_http(first, num_tokens, leave_at, got)
        else:
            async with self._grpc.generate(prompt_token_ids=[first], max_tokens=num_tokens, ignore_eos=True) as stream:
                async for chunk in stream:
                    got += chunk.token_ids
                    if len(got) > leave_at:
                        break
        assert got == list(range(first, first + len(got))), f"wrong tokens: {got[:4]}... after {first}"
        if leave_at < num_tokens:
            return "left"
        assert len(got) == num_tokens, f"{len(got)} tokens of {num_tokens}"
        return "complete"

    async def _over_http(self, first: int, num_tokens: int, leave_at: int, got: list[int]) -> None:
        asked = {"prompt": [first], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = await reader.readline()
            assert b" 200 " in status, status
            while b"[DONE]" not in (line := await reader.readline()):
                assert line, "the answer ends before [DONE]"
                if line.startswith(b"data: "):
                    text = json.loads(line[6:])["choices"][0]["text"]
                    got += [int(word.strip("<>")) for word in text.split()]
                    if len(got) > leave_at:
                        return
        finally:
            writer.close()


async def ask(grpc_port: int, http_port: int, num_streams: int, seconds: float) -> None:
    """What the clients' process does. It prints ends and failures as JSON."""
    ends, failures, until = Counter[str](), list[str](), time.monotonic() + seconds
    shared = [AsyncClient(f"127.0.0.1:{grpc_port}", max_tries=1) for _ in range(-(-num_streams // STREAMS_PER_CLIENT))]
    clients = [
        Client(http_port, shared[i // STREAMS_PER_CLIENT] if i % 2 else None, random.Random(i))
        for i in range(num_streams)
    ]
    await asyncio.gather(*(client.until(until, ends, failures) for client in clients))
    for client in shared:
        await client.close()
    print(json.dumps([ends, failures]))


async def measure(num_streams: int, seconds: float, step_s: float) -> Report:
    engine = PlayedEngine()
    # The played engine reports no status.
    config = RouterConfig(grpc_port=0, http_port=0, metrics_port=0, replica_timeout_s=10 * seconds + 600)
    router = Router(config, address=Address("router", 1), clock=time.monotonic, seed=1)
    loop = CoreLoop(router, config, send=lambda address, message: engine.take(message), clock=time.monotonic)
    door = FrontDoor(
        OwnLink(loop),
        NumberTokenizer(VOCAB_SIZE),
        config,
        Model("played", VOCAB_SIZE),
        clock=time.monotonic,
        totals=loop.doors.totals,
    )
    listeners = Listeners(config).of_door(door, CollectorRegistry())
    server = Listening(list(listeners.values()), config.tick_interval_s, loop)
    ports = dict(zip(listeners, await server.start(), strict=True))
    router.replica_started(ENGINE)
    hello = Hello(
        role="decode",
        layout_fingerprint=b"",
        block_size=16,
        num_blocks=999_999,
        max_num_seqs=2 * num_streams,
        max_model_len=2048,
        max_prompt_tokens=2047,
        endpoint=b"",
    )
    loop.deliver(Envelope(ENGINE, router.address, 0, hello))
    arguments = ["-m", "bench.streams", "--ask", f"{ports['grpc_port']},{ports['http_port']}"]
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments, "--streams", str(num_streams), "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    asking, begun, seq = asyncio.create_task(clients.communicate()), time.monotonic(), 1
    warm = most = 0
    while not asking.done() or (router.num_open and time.monotonic() < begun + seconds + SETTLE_S):
        loop.deliver(Envelope(ENGINE, router.address, seq, engine.step()))
        seq += 1
        most = max(most, memory_bytes(os.getpid()))
        if time.monotonic() < begun + seconds / 4:
            warm = most
        await asyncio.sleep(step_s)
    ends, failures = json.loads((await asking)[0])
    report = Report(num_streams, seconds, ends, failures, engine.most_open, router.num_open, warm, most)
    await server.stop(0.1)
    await door.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Many streams over both doors; none may fail, and memory must be flat."
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--step-s", type=float, default=0.2, help="Time between two steps of the played engine.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask is not None:
        grpc_port, http_port = map(int, arguments.ask.split(","))
        asyncio.run(ask(grpc_port, http_port, arguments.streams, arguments.seconds))
        return
    report = asyncio.run(measure(arguments.streams, arguments.seconds, arguments.step_s))
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
        print(f"{report.streams} streams for {report.seconds:g} s, at most {report.most_open} at once: {ends}")
        print(f"memory of the router {report.warm_bytes / 2**20:.1f} -> {report.most_bytes / 2**20:.1f} MiB")
    problems = report.problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
