"""The bare servers beside the router write every step, however slow a stream is."""

import asyncio

from bench.router import NUM_STEPS, _turns, _wake
from tests.hang import HANG_S


def test_steps_that_come_while_a_stream_writes_are_not_lost() -> None:
    async def run() -> None:
        turns: list[asyncio.Semaphore] = []
        first, written = asyncio.Event(), asyncio.Event()

        async def stream() -> list[int]:
            seen = []
            async for step in _turns(turns, 64):
                seen.append(step)
                first.set()
                await written.wait()
            return seen

        streaming = asyncio.create_task(stream())
        while not turns:
            await asyncio.sleep(0)
        _wake(turns)
        await first.wait()
        for _ in range(NUM_STEPS[64] - 1):
            _wake(turns)
        written.set()
        assert await asyncio.wait_for(streaming, HANG_S) == list(range(NUM_STEPS[64]))

    asyncio.run(run())
