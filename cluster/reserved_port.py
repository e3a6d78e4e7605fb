"""A port that several processes of this machine listen on: kept for them, and from everybody else."""

import socket
from contextlib import ExitStack
from typing import Self

from protocol.errors import CapacityError


class ReservedPort:
    """Holds a port by sockets that are bound and do not listen. Doors join it with SO_REUSEPORT, which the kernel
    allows to processes of the same user alone. With port 0 the system chooses one.

    Raises CapacityError, which names the `knob`, if anybody else has the port.
    """

    def __init__(self, knob: str, host: str, port: int) -> None:
        self.port = port
        with ExitStack() as taken:
            try:
                for family, kind, _, _, address in socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                ):
                    held = taken.enter_context(socket.socket(family, kind))
                    _bind(held, address[0], self.port)
                    self.port = held.getsockname()[1]
            except OSError as error:
                shown = f"[{host}]" if ":" in host else host
                raise CapacityError(f"{knob}: {shown}:{port} is taken, or not an address of this machine") from error
            self._held = taken.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.close()


def _bind(held: socket.socket, host: str | int, port: int) -> None:
    """Binds as a sole owner, who may come after connections that have just ended, and only then lets others join."""
    if held.family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
