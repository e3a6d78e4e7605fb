"""Watches the processes of Ray that a deployment needs. Without them nobody can replace an actor that dies.

Nothing here asks Ray itself, whose answers can take minutes when a part of it is gone.
"""

import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

PRIVATE = ("gcs_server", "raylet")
"""Names in /proc of a private Ray's processes. They are children of this process."""
ASK_EVERY_S = 1.0
"""Interval between two connections to a part of a given Ray."""
CONNECT_TIMEOUT_S = 1.0
LOST_AFTER_S = 5.0
"""A part of a given Ray that takes no connection for this long is lost. A full backlog is over sooner."""


class Parts(Protocol):
    def look(self) -> None:
        """Finds parts that have appeared."""

    def lost(self) -> str:
        """Names what has died, in words; empty while all parts live. It never waits for long."""

    def close(self) -> None: ...


class PrivateParts:
    """The parts of a private Ray. It is made before that Ray starts, so that `look` finds each part as it appears."""

    def __init__(self) -> None:
        self._others = _children()
        self._found: dict[int, tuple[str, int]] = {}
        """Name and pidfd of each part, by pid."""

    def look(self) -> None:
        """Finds new parts, also one that has died since the last look: nobody has collected its exit status."""
        for pid, name in _children().items():
            if name in PRIVATE and pid not in self._found and pid not in self._others:
                self._found[pid] = name, os.pidfd_open(pid)

    def lost(self) -> str:
        watched = select.poll()
        names = {fd: name for name, fd in self._found.values()}
        for fd in names:
            watched.register(fd, select.POLLIN)
        dead = sorted(names[fd] for fd, _ in watched.poll(0))
        return f"{' and '.join(dead)} of the private Ray died" if dead else ""

    def close(self) -> None:
        for _, fd in self._found.values():
            os.close(fd)
        self._found.clear()


def _children() -> dict[int, str]:
    """Names of this process's children by pid, including dead ones whose exit status nobody has collected."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, rest = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(rest.split()[1]) == os.getpid():
                found[int(entry.name)] = head.partition("(")[2]
    return found


@dataclass(slots=True)
class GivenPart:
    """A part of a given Ray, known by the port on which it listens."""

    name: str
    host: str
    port: int
    clock: Callable[[], float] = time.monotonic
    _asked_at: float = field(init=False)
    _reached_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._asked_at = self._reached_at = self.clock()

    def lost(self) -> str:
        now = self.clock()
        if now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            try:
                socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S).close()
            except OSError as error:
                if now - self._reached_at > LOST_AFTER_S:
                    return f"{self.name} at {self.host}:{self.port} has not answered for {LOST_AFTER_S:g} s: {error}"
            else:
                self._reached_at = now
        return ""


@dataclass(frozen=True, slots=True)
class GivenParts:
    """The parts of a given Ray: its GCS, and the raylet of this machine."""

    parts: tuple[GivenPart, ...]

    def look(self) -> None:
        """Does nothing: all parts are known from the start."""

    def lost(self) -> str:
        return next(filter(None, (part.lost() for part in self.parts)), "")

    def close(self) -> None:
        """Does nothing: no part keeps a connection open."""
