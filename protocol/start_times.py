"""What a process did when while it started. Each process of a deployment notes its own phases, always; `--timings`
shows them all. The clock is the kernel's monotonic one, which the processes of a machine share.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Phase(NamedTuple):
    """Begin and end are in seconds of this machine's monotonic clock. `cpu_s` is what all threads of the process used
    meanwhile: much less than the phase took if it waited, for something or for a core.
    """

    name: str
    began_at: float
    ended_at: float
    cpu_s: float


class Moment(NamedTuple):
    at: float
    cpu_s: float


def now() -> Moment:
    return Moment(time.monotonic(), time.process_time())


_IMPORTED = now()
_phases: dict[str, Phase] = {}
"""By name. What happens again later is no part of the start."""


def note(name: str, began: Moment) -> None:
    """Notes a phase that ends now, unless one of this name has been noted before."""
    ended = now()
    _phases.setdefault(name, Phase(name, began.at, ended.at, ended.cpu_s - began.cpu_s))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Notes a phase if the body raises nothing. Any thread may do so."""
    began = now()
    yield
    note(name, began)


def phases() -> list[Phase]:
    """This process's phases. The first lasts from the process's beginning until this module was imported."""
    return [Phase("process", _process_began_at(), _IMPORTED.at, _IMPORTED.cpu_s), *_phases.values()]


def note_imports() -> None:
    """Notes a phase "imports" from the import of this module, which should be a process's first, until now."""
    note("imports", _IMPORTED)


def _process_began_at() -> float:
    """From /proc, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    booted_ago_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() - booted_ago_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
