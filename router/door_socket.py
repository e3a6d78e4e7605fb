"""The way between the core and the doors of other processes: a Unix socket of this machine, in the abstract namespace.

A connection keeps order and loses nothing, and it ends with either process. So a door lives, for the core, as long as
its connection: each one gets an epoch of its own, and nothing is numbered or sent again. A message is a frame: its
length in four bytes, then what router/door_wire.py makes of it. The first frame of a door is its name. Neither end
speaks with a process of another user.
"""

import asyncio
import logging
import os
import socket
import struct
from functools import partial
from itertools import count

from protocol.errors import ProtocolError
from protocol.messages import Address
from router.core_loop import CoreLoop
from router.door_link import DoorEnd
from router.door_messages import Batch, DoorMessage
from router.door_wire import decode_batch, decode_message, encode_batch, encode_message

LENGTH = struct.Struct("<I")
PEER = struct.Struct("3i")
"""What the kernel tells of a peer: process, user and group."""
RECONNECT_S = 0.05

log = logging.getLogger(__name__)


def socket_name(prefix: str, core: Address) -> str:
    return f"{prefix}{core.replica_id}-{core.epoch}"


class Frames(asyncio.Protocol):
    """One end of a connection. Each frame goes into `inbox`, and None once nothing more comes."""

    def __init__(self, inbox: "Inbox") -> None:
        self._inbox = inbox
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        """Does not wait. After the end of the connection it does nothing."""
        if self._transport is not None:
            self._transport.write(LENGTH.pack(len(frame)) + frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _, uid, _ = PEER.unpack(peer)
        if uid != os.getuid():
            log.warning("a process of another user was turned away", extra={"uid": uid})
            transport.abort()
            return
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(received, start)
            end = start + LENGTH.size + length
            if len(received) < end:
                break
            self._inbox.put_nowait((self, bytes(received[start + LENGTH.size : end])))
            start = end
        del received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._inbox.put_nowait((self, None))


Inbox = asyncio.Queue[tuple[Frames, bytes | None]]


class CoreSocket:
    """Where doors reach the core: listens from `start` to `stop`, and serves while `run` runs."""

    def __init__(self, core: CoreLoop, name: str) -> None:
        self._core, self._name = core, name
        self._epochs = count(1)
        self._inbox: Inbox = asyncio.Queue()
        self._doors: dict[Frames, Address] = {}
        self._server: asyncio.Server | None = None

    @property
    def doors(self) -> list[str]:
        """The names of the doors that are connected."""
        return [address.replica_id for address in self._doors.values()]

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(
            partial(Frames, self._inbox), path=f"\0{self._name}"
        )

    async def run(self) -> None:
        """Hands messages on until it is cancelled. Anything it raises is a bug in the core."""
        while True:
            frames, frame = await self._inbox.get()
            door = self._doors.get(frames)
            if frame is None:
                if door is not None:
                    del self._doors[frames]
                    self._core.disconnect(door)
            elif door is None:
                door = self._doors[frames] = Address(frame.decode(), next(self._epochs))
                self._core.connect(door, partial(_send_batch, frames))
            else:
                self._take(frames, door, frame)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for frames in self._doors:
            frames.close()

    def _take(self, frames: Frames, door: Address, frame: bytes) -> None:
        try:
            message = decode_message(frame)
        except ProtocolError:  # whatever is wrong with that door, the others go on
            log.exception("a door is cut off")
            frames.close()
        else:
            self._core.take(door, message)


def _send_batch(frames: Frames, batch: Batch) -> None:
    frames.send(encode_batch(batch))


class FarLink:
    """The way to a core in another process: a `CoreLink` that `run` keeps open. `name`: the door's. `prefix` begins the
    names of cores' sockets.
    """

    def __init__(self, name: str, prefix: str) -> None:
        self._name, self._prefix = name, prefix
        self._core: Address | None = None
        self._known = asyncio.Event()
        self._inbox: Inbox = asyncio.Queue()
        self._frames: Frames | None = None

    def connect(self, door: DoorEnd) -> None:
        self._door = door

    def send(self, message: DoorMessage) -> None:
        assert self._frames is not None, "nothing is sent while no core is up"
        self._frames.send(encode_message(message))

    def core_up(self, core: Address) -> None:
        """Takes note of a core that has started. The way to the one before is given up. Older ones are ignored."""
        if self._core is None or core.epoch > self._core.epoch:
            self._core = core
            self._known.set()
            if self._frames is not None:
                self._frames.close()

    async def run(self) -> None:
        """Connects to the core, again and again, until it is cancelled. Anything it raises is a bug in the door."""
        await self._known.wait()
        while True:
            try:
                _, frames = await asyncio.get_running_loop().create_unix_connection(
                    partial(Frames, self._inbox), path=f"\0{self._socket_name}"
                )
            except OSError:  # nobody listens: it has not started, or is dead
                await asyncio.sleep(RECONNECT_S)
                continue
            await self._serve(frames)

    @property
    def _socket_name(self) -> str:
        assert self._core is not None
        return socket_name(self._prefix, self._core)

    async def _serve(self, frames: Frames) -> None:
        """Hands batches on as long as the connection lasts."""
        frames.send(self._name.encode())
        self._frames = frames
        self._door.up()
        log.info("core up", extra={"socket": self._socket_name})
        while True:
            sender, frame = await self._inbox.get()
            if frame is None and sender is frames:
                break
            if frame is not None and sender is frames:
                self._door.receive(decode_batch(frame))
        self._frames = None
        self._door.down()
        log.warning("core down", extra={"socket": self._socket_name})
