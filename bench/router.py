"""What the router adds to a token: from an engine's `StepTokens` arriving to the client having it, 64 streams at once.

    python -m bench.router [--json]

The real core, front door and gRPC server run in this process, a client in another; one engine is played by a timer that hands in one
`StepTokens` with a token for every stream. Both processes read the same monotonic clock of this machine.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time

import numpy as np

from protocol.messages import Address, End, Envelope, GenerateRequest, Hello, Int64, Message, StepTokens
from router.config import RouterConfig
from router.frontdoor import FrontDoor, Model
from router.router import Router
from router.server import Server
from router.tokenizer import NumberTokenizer

NUM_STREAMS = 64
NUM_STEPS = 200
STEP_S = 0.02
ENGINE = Address("decode-0", 2)

CLIENT = """
import asyncio, json, sys, time
from twopass import AsyncClient
port, streams, tokens = map(int, sys.argv[1:4])
async def one(client, index):
    times = []
    async for chunk in client.generate(prompt_token_ids=[index + 1], max_tokens=tokens, ignore_eos=True):
        times += [(token, time.perf_counter()) for token in chunk.token_ids]
    return times
async def main():
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        print(json.dumps(await asyncio.gather(*(one(client, index) for index in range(streams)))))
asyncio.run(main())
"""


async def measure() -> dict[str, float]:
    """Milliseconds per token, p50 and p99, over all streams and steps."""
    dispatched: dict[int, int] = {}
    sent_at: list[float] = []

    def send(address: Address, message: Message) -> None:
        if isinstance(message, GenerateRequest):
            dispatched[message.slot] = message.key.attempt

    router = Router(RouterConfig(), address=Address("router", 1), clock=time.perf_counter, seed=1)
    config = RouterConfig(grpc_port=0, metrics_port=0)
    door = FrontDoor(router, NumberTokenizer(32_000), config, Model("played", 32_000), send=send, clock=time.perf_counter)
    server = Server(door, config)
    port = await server.start()
    router.replica_started(ENGINE)
    hello = Hello(role="decode", layout_fingerprint=b"", block_size=16, num_blocks=9999, max_num_seqs=256, max_model_len=2048, endpoint=b"")
    door.deliver(Envelope(ENGINE, router.address, 0, hello))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(port), str(NUM_STREAMS), str(NUM_STEPS)], stdout=subprocess.PIPE, text=True
    )
    reading = asyncio.create_task(asyncio.to_thread(client.communicate))
    while len(dispatched) < NUM_STREAMS:
        await asyncio.sleep(0.01)
    slots = np.array(sorted(dispatched), np.int64)
    ones = np.ones(NUM_STREAMS, np.int32)
    for step in range(NUM_STEPS):
        message = StepTokens(
            router_epoch=1, slots=slots, attempts=ones, offsets=ones * step, counts=ones, token_ids=ones * step, ends=_ends(slots, step)
        )
        sent_at.append(time.perf_counter())
        door.deliver(Envelope(ENGINE, router.address, step + 1, message))
        await asyncio.sleep(STEP_S)
    streams = json.loads((await reading)[0])
    await server.stop(0.1)
    added = np.array([at - sent_at[token] for stream in streams for token, at in stream]) * 1e3
    return {"streams": NUM_STREAMS, "tokens": len(added), "p50_ms": float(np.median(added)), "p99_ms": float(np.percentile(added, 99))}


def _ends(slots: Int64, step: int) -> tuple[End, ...]:
    return tuple(End(int(slot), 1, "finished", "length") for slot in slots) if step == NUM_STEPS - 1 else ()


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency that the router and gRPC add to each token.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(measure())
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"router and gRPC, {result['streams']} streams: {result['p50_ms']:.2f} ms p50, {result['p99_ms']:.2f} ms p99 a token")


if __name__ == "__main__":
    main()
