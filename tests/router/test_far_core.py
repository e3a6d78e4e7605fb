"""A front door whose core is far away: messages arrive when the test lets them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol.errors import InvalidRequest, Overloaded, RequestCancelled, RequestFailed
from router.admission import ClientRequest
from router.call import Piece
from router.call_request import CallRequest, Prompt, SamplingOptions
from router.config import RouterConfig
from router.core_loop import OWN_DOOR, CoreLoop
from router.door_link import DoorEnd
from router.door_messages import Batch, DoorMessage, Stop
from router.frontdoor import FrontDoor, Model
from router.metrics_totals import DoorTotals
from router.tokenizer import NumberTokenizer
from tests.hang import HANG_S
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore


class FarLink:
    """A `CoreLink`. `to_core` and `to_door` are on the way until `arrive`."""

    def __init__(self, core: CoreLoop) -> None:
        self._core = core
        self.to_core: list[DoorMessage] = []
        self.to_door: list[Batch] = []

    def connect(self, door: DoorEnd) -> None:
        self.door = door
        self.up()
        self.arrive()

    def up(self) -> None:
        self.door.up()
        self._core.connect(OWN_DOOR, self.to_door.append)

    def down(self) -> None:
        """The core dies with all that is on the way."""
        self._core.disconnect(OWN_DOOR)
        self.to_core.clear()
        self.to_door.clear()
        self.door.down()

    def send(self, message: DoorMessage) -> None:
        self.to_core.append(message)

    def arrive_at_core(self) -> None:
        while self.to_core:
            self._core.take(OWN_DOOR, self.to_core.pop(0))

    def arrive(self) -> None:
        while self.to_core or self.to_door:
            self.arrive_at_core()
            while self.to_door:
                self.door.receive(self.to_door.pop(0))


class Far:
    def __init__(self, core: ScriptedCore) -> None:
        config = RouterConfig()
        self.core = core
        self.loop = CoreLoop(core, config, send=lambda address, message: None, clock=time.monotonic)
        self.link = FarLink(self.loop)
        model = Model("arithmetic", VOCAB_SIZE)
        self.door = FrontDoor(
            self.link, NumberTokenizer(VOCAB_SIZE), config, model, clock=time.monotonic, totals=DoorTotals()
        )

    def generate(self, name: str = "mine", **options: Any) -> asyncio.Task[list[Piece]]:
        asked = CallRequest(prompt=Prompt(token_ids=[1]), sampling=SamplingOptions(**options), request_id=name)

        async def read() -> list[Piece]:
            return [piece async for piece in self.door.generate(lambda: asked, deadline_s=None)]

        return asyncio.create_task(read())

    async def sent(self, kind: type) -> None:
        """Waits until the door has sent such a message."""
        while not any(isinstance(message, kind) for message in self.link.to_core):
            await asyncio.sleep(0)


def far(test: Callable[[Far], Awaitable[None]], core: ScriptedCore | None = None) -> None:
    async def main() -> None:
        served = Far(core or ScriptedCore())
        await test(served)
        assert served.door.num_open == 0
        await served.door.close()

    asyncio.run(asyncio.wait_for(main(), HANG_S))


async def cancelled(reading: asyncio.Task[list[Piece]]) -> None:
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


def counted(counts: dict[str, int]) -> dict[str, int]:
    return {word: count for word, count in counts.items() if count}


def test_a_client_that_leaves_before_the_core_has_answered_is_cancelled_there() -> None:
    async def test(f: Far) -> None:
        reading = f.generate()
        while not f.link.to_core:
            await asyncio.sleep(0)
        await cancelled(reading)
        assert f.door.num_open == 1
        f.link.arrive()
        assert f.core.cancelled == ["mine"]
        assert (counted(f.door.totals.ends), counted(f.door.totals.refusals)) == ({"cancelled": 1}, {})

    far(test)


def overloaded(core: ScriptedCore, request: ClientRequest) -> None:
    raise Overloaded("full", retry_after_s=1.0)


def test_a_client_that_leaves_before_it_is_refused_is_counted_as_refused() -> None:
    async def test(f: Far) -> None:
        reading = f.generate()
        while not f.link.to_core:
            await asyncio.sleep(0)
        await cancelled(reading)
        f.link.arrive()
        assert (counted(f.door.totals.ends), counted(f.door.totals.refusals)) == ({}, {"queue_full": 1})

    far(test, ScriptedCore(overloaded))


def test_after_a_stop_string_the_core_is_told_once_and_its_end_makes_the_last_piece() -> None:
    async def test(f: Far) -> None:
        reading = f.generate(stop=["<6>"])
        while not f.link.to_core:
            await asyncio.sleep(0)
        f.link.arrive()
        f.core.tokens("mine", 5, 6)
        f.loop.pump()
        f.link.arrive()
        await f.sent(Stop)
        f.core.tokens("mine", 7)
        f.loop.pump()
        f.link.door.receive(f.link.to_door.pop(0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert sum(isinstance(message, Stop) for message in f.link.to_core) == 1
        f.link.arrive()
        pieces = await reading
        assert [(piece.text, piece.token_ids, piece.finish_reason) for piece in pieces] == [
            ("<5> ", [5, 6], None),
            ("", [], "stop"),
        ]

    far(test)


def test_of_two_calls_of_one_name_the_second_is_refused_before_the_core_has_answered() -> None:
    async def test(f: Far) -> None:
        reading = f.generate()
        while not f.link.to_core:
            await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="still open"):
            await f.generate()
        f.link.arrive()
        f.core.end("mine", "stop")
        f.loop.pump()
        f.link.arrive()
        (piece,) = await reading
        assert piece.finish_reason == "stop"

    far(test)


def test_cancelled_answers_count_once_their_ends_are_here() -> None:
    async def test(f: Far) -> None:
        reading = f.generate()
        while not f.link.to_core:
            await asyncio.sleep(0)
        f.link.arrive()
        await asyncio.sleep(0)
        await cancelled(reading)
        assert (f.door.num_open, counted(f.door.totals.ends)) == (1, {})
        f.link.arrive()
        assert counted(f.door.totals.ends) == {"cancelled": 1}

    far(test)


def test_abort_and_loads_wait_for_the_core() -> None:
    async def test(f: Far) -> None:
        f.core.num_open = 4
        aborting, asking = asyncio.create_task(f.door.abort("other")), asyncio.create_task(f.door.loads())
        await asyncio.sleep(0)
        f.link.arrive()
        assert (await aborting, (await asking).num_open) == (False, 4)
        reading = f.generate()
        while not f.link.to_core:
            await asyncio.sleep(0)
        f.link.arrive()
        assert await f.door.abort("mine")
        f.link.arrive()
        with pytest.raises(RequestCancelled):
            await reading

    far(test)


def test_a_core_that_dies_ends_everything_and_the_next_one_is_served() -> None:
    async def test(f: Far) -> None:
        reading, opening = f.generate("mine"), f.generate("late")
        while len(f.link.to_core) < 2:
            await asyncio.sleep(0)
        f.link.to_core.pop()
        f.link.arrive()
        f.core.tokens("mine", 5)
        f.loop.pump()
        f.link.arrive()
        asking, aborting = asyncio.create_task(f.door.loads()), asyncio.create_task(f.door.abort("other"))
        await asyncio.sleep(0)
        assert f.door.facts.ready
        f.link.down()
        for waiting in (reading, opening, asking, aborting, f.generate(), asyncio.create_task(f.door.loads())):
            with pytest.raises(RequestFailed, match="the router is down"):
                await waiting
        assert not f.door.facts.ready
        f.door.report()
        assert (counted(f.door.totals.ends), counted(f.door.totals.refusals)) == ({"failed": 1}, {"no_engine": 2})
        f.link.up()
        f.link.arrive()
        reading = f.generate("again")
        while not f.link.to_core:
            await asyncio.sleep(0)
        f.link.arrive()
        f.core.end("again", "stop")
        f.loop.pump()
        f.link.arrive()
        (piece,) = await reading
        assert piece.finish_reason == "stop"
        before = counted(f.loop.doors.totals.ends)  # the dead core counted what it saw of the door's end
        f.door.report()
        f.link.arrive()
        assert set(f.door.totals.ends.values()) == {0}
        assert counted(f.loop.doors.totals.ends) == {"failed": before["failed"] + 1, "stop": 1}

    far(test)
