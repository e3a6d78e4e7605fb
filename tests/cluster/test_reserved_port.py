"""A port that doors share, in front of real listeners."""

import asyncio
import socket

import pytest

from cluster.reserved_port import ReservedPort
from protocol.errors import CapacityError
from router.http_server import HttpServer
from tests.router.scripted_core import ScriptedCore, serving


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_that_another_process_has_is_refused(reuse: bool) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CapacityError, match=f"grpc_port: 127.0.0.1:{port} is taken"):
            ReservedPort("grpc_port", "127.0.0.1", port)


def test_a_port_that_another_deployment_has_reserved_is_refused_while_no_door_listens() -> None:
    held = ReservedPort("grpc_port", "127.0.0.1", 0)
    with pytest.raises(CapacityError):
        ReservedPort("grpc_port", "127.0.0.1", held.port)
    with pytest.raises(CapacityError):
        asyncio.run(_serve(held.port, doors=0))
    held.close()
    ReservedPort("grpc_port", "127.0.0.1", held.port).close()


def test_a_host_of_several_addresses_has_the_port_on_all() -> None:
    held = ReservedPort("grpc_port", "localhost", 0)
    with pytest.raises(CapacityError):
        ReservedPort("grpc_port", "127.0.0.1", held.port)
    held.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CapacityError, match="not an address of this machine"):
        ReservedPort("http_port", "192.0.2.1", 0)


async def _serve(port: int, doors: int) -> None:
    async with serving(ScriptedCore(), grpc_port=port, doors=doors):
        pass


def test_two_doors_share_a_reserved_port() -> None:
    held = ReservedPort("grpc_port", "127.0.0.1", 0)

    async def main() -> None:
        async with serving(ScriptedCore(), grpc_port=held.port, doors=2) as first:
            async with serving(ScriptedCore(), grpc_port=held.port, doors=2) as second:
                assert first.address == second.address == f"127.0.0.1:{held.port}"
            with pytest.raises(CapacityError):
                ReservedPort("grpc_port", "127.0.0.1", held.port)

    asyncio.run(main())
    held.close()


def test_two_http_doors_share_a_reserved_port() -> None:
    held = ReservedPort("http_port", "127.0.0.1", 0)

    async def main() -> None:
        doors = [
            HttpServer(
                _nothing, "http", "127.0.0.1", held.port, read_timeout_s=1.0, write_timeout_s=1.0, share_port=True
            )
            for _ in range(2)
        ]
        assert [await door.start() for door in doors] == [held.port] * 2
        for door in doors:
            await door.stop(0.0)

    asyncio.run(main())
    held.close()


async def _nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody connects")
