"""The way between doors and the core over a real socket, in one process."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from protocol.errors import RequestFailed
from protocol.messages import Address
from router.admission import ClientRequest
from router.call import Piece
from router.call_request import CallRequest, Prompt
from router.config import RouterConfig
from router.core_loop import CoreLoop
from router.door_socket import LENGTH, CoreSocket, FarLink, socket_name
from router.frontdoor import FrontDoor, Model
from router.metrics_totals import DoorTotals
from router.tokenizer import NumberTokenizer
from tests.hang import HANG_S
from tests.router.scripted_core import VOCAB_SIZE, ScriptedCore, echo

CONFIG = RouterConfig(tick_interval_s=0.001)


class Machine:
    """Cores and doors of one machine."""

    def __init__(self) -> None:
        self.prefix = f"twopass-test-{secrets.token_hex(4)}-"
        self.running = AsyncExitStack()

    async def core(self, epoch: int, core: ScriptedCore) -> "RunningCore":
        return await self.running.enter_async_context(RunningCore.started(self.prefix, Address("router", epoch), core))

    async def door(self, name: str) -> "RunningDoor":
        return await self.running.enter_async_context(RunningDoor.started(self.prefix, name))


class RunningCore:
    def __init__(self, address: Address, loop: CoreLoop, socket: CoreSocket) -> None:
        self.address, self.loop, self.socket = address, loop, socket

    @classmethod
    @asynccontextmanager
    async def started(cls, prefix: str, address: Address, core: ScriptedCore) -> AsyncIterator["RunningCore"]:
        loop = CoreLoop(core, CONFIG, send=lambda address, message: None, clock=time.monotonic)
        socket = CoreSocket(loop, socket_name(prefix, address))
        await socket.start()
        running = asyncio.gather(loop.run(), socket.run())
        try:
            yield cls(address, loop, socket)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await socket.stop()

    async def has(self, *doors: str) -> None:
        """Waits until exactly these are connected."""
        while sorted(self.socket.doors) != sorted(doors):
            await asyncio.sleep(0.001)


class RunningDoor:
    def __init__(self, door: FrontDoor, link: FarLink, running: "asyncio.Task[None]") -> None:
        self.door, self.link, self.running = door, link, running

    @classmethod
    @asynccontextmanager
    async def started(cls, prefix: str, name: str) -> AsyncIterator["RunningDoor"]:
        link = FarLink(name, prefix)
        door = FrontDoor(
            link,
            NumberTokenizer(VOCAB_SIZE),
            CONFIG,
            Model("arithmetic", VOCAB_SIZE),
            clock=time.monotonic,
            totals=DoorTotals(),
        )
        running = asyncio.create_task(link.run())
        try:
            yield cls(door, link, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await door.close()

    async def ready(self) -> None:
        while not self.door.facts.ready:
            await asyncio.sleep(0.001)

    async def read(self, name: str, *token_ids: int) -> list[Piece]:
        asked = CallRequest(prompt=Prompt(token_ids=list(token_ids)), request_id=name)
        async with aclosing(self.door.generate(lambda: asked, deadline_s=None)) as pieces:
            return [piece async for piece in pieces]


def machine(test: Callable[[Machine], Awaitable[None]]) -> None:
    async def main() -> None:
        world = Machine()
        async with world.running:
            await test(world)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_every_door_serves_its_own_calls() -> None:
    async def test(m: Machine) -> None:
        core = await m.core(1, ScriptedCore(echo))
        doors = [await m.door(f"door-{i}") for i in range(2)]
        for door in doors:
            door.link.core_up(core.address)
            await door.ready()
        await core.has("door-0", "door-1")
        answers = await asyncio.gather(
            *(door.read(f"{i} {j}".replace(" ", "-"), i, j) for i, door in enumerate(doors) for j in range(20))
        )
        assert [[token for piece in pieces for token in piece.token_ids] for pieces in answers] == [
            [i, j] for i in range(2) for j in range(20)
        ]
        for door in doors:
            door.door.report()
        while core.loop.doors.totals.ends["length"] < 40:
            await asyncio.sleep(0.001)

    machine(test)


def test_a_door_that_goes_is_cancelled_and_one_of_its_name_may_come() -> None:
    async def test(m: Machine) -> None:
        scripted = ScriptedCore()
        core = await m.core(1, scripted)
        async with RunningDoor.started(m.prefix, "door-0") as first:
            first.link.core_up(core.address)
            await first.ready()
            reading = asyncio.create_task(first.read("mine", 1))
            await scripted.calls.get()
            first.running.cancel()
            await asyncio.gather(first.running, return_exceptions=True)
            assert first.link._frames is not None
            first.link._frames.close()
            await core.has()
            assert scripted.cancelled == ["mine"]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        second = await m.door("door-0")
        second.link.core_up(core.address)
        await core.has("door-0")

    machine(test)


def test_a_core_that_goes_ends_the_calls_and_the_next_one_is_found() -> None:
    async def test(m: Machine) -> None:
        door, scripted = await m.door("door-0"), ScriptedCore()
        async with RunningCore.started(m.prefix, Address("router", 3), scripted) as first:
            door.link.core_up(first.address)
            await door.ready()
            reading = asyncio.create_task(door.read("mine", 1))
            await scripted.calls.get()
        with pytest.raises(RequestFailed, match="the router is down"):
            await reading
        assert not door.door.facts.ready
        second = await m.core(5, ScriptedCore(echo))
        door.link.core_up(second.address)
        door.link.core_up(Address("router", 4))  # it was said before, and comes late
        await door.ready()
        assert [piece.token_ids for piece in await door.read("mine", 1)] == [[1]]

    machine(test)


def test_a_core_that_is_named_before_it_listens_is_found_too() -> None:
    async def test(m: Machine) -> None:
        door = await m.door("door-0")
        door.link.core_up(Address("router", 1))
        await asyncio.sleep(0)
        await m.core(1, ScriptedCore())
        await door.ready()

    machine(test)


def test_a_door_that_talks_nonsense_is_cut_off_and_others_go_on() -> None:
    async def test(m: Machine) -> None:
        core = await m.core(1, ScriptedCore(echo))
        door = await m.door("door-0")
        door.link.core_up(core.address)
        await core.has("door-0")
        reader, writer = await asyncio.open_unix_connection(f"\0{socket_name(m.prefix, core.address)}")
        for frame in (b"door-1", b"\xffnonsense"):
            writer.write(LENGTH.pack(len(frame)) + frame)
        await reader.read()
        writer.close()
        await core.has("door-0")
        assert [piece.token_ids for piece in await door.read("mine", 4)] == [[4]]

    machine(test)


def test_a_message_of_many_pieces_and_many_in_one_piece_arrive_whole() -> None:
    async def test(m: Machine) -> None:
        asked: list[ClientRequest] = []

        def note(core: ScriptedCore, request: ClientRequest) -> None:
            asked.append(request)
            echo(core, request)

        core = await m.core(1, ScriptedCore(note))
        door = await m.door("door-0")
        door.link.core_up(core.address)
        await door.ready()
        prompts = [[index % VOCAB_SIZE] * (200_000 if index == 3 else 5) for index in range(50)]
        core.loop.core.max_model_len = 1_000_000  # type: ignore[misc]
        while door.door.facts.max_model_len < 1_000_000:
            await asyncio.sleep(0.001)
        answers = await asyncio.gather(
            *(door.read(f"r{index}", *prompt) for index, prompt in enumerate(prompts)), return_exceptions=True
        )
        assert sorted(len(request.prompt_token_ids) for request in asked) == sorted(map(len, prompts))
        assert sum(isinstance(answer, list) for answer in answers) == 49, "one is too long for its client's buffer"

    machine(test)


def test_a_process_of_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(m: Machine) -> None:
        core = await m.core(1, ScriptedCore())
        monkeypatch.setattr("os.getuid", lambda: 4_000_000)
        reader, writer = await asyncio.open_unix_connection(f"\0{socket_name(m.prefix, core.address)}")
        assert await reader.read() == b""
        writer.close()
        assert core.socket.doors == []

    machine(test)
