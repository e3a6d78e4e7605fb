"""An engine as one process: an inlet for messages, and calls for its supervisor. This is a plain class; the composition
root makes a Ray actor of it.

The actor is a *synchronous* one, because Ray keeps the order of a sender's calls only for those. The engine runs in the
loop's own threads.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from protocol import start_times  # first, because it notes when imports began

# isort: split
from engine.loop import EngineLoop
from protocol.errors import EngineStalled, startup_errors
from protocol.log import LogLevel, configure, set_level
from protocol.messages import Address, Envelope

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a busy thread keeps the interpreter. At Python's default of 5 ms a delivery waits for the step thread."""


class EngineActor:
    """Holds one engine's loop. `build` makes the loop in the process where it is to live; what it puts on the stack
    lives until `stop`.

    The process and its logs belong to this engine alone.
    """

    def __init__(self, address: Address, log_level: LogLevel, build: Callable[[ExitStack], EngineLoop]) -> None:
        start_times.note_imports()
        configure(log_level, address)
        self._name = address.replica_id
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._build = build
        self._resources = ExitStack()
        self._loop: EngineLoop | None = None

    def start(self) -> None:
        """Loads the model, allocates the cache and starts the threads. It raises StartupError, whatever the cause was
        (out of memory, a compiler that fails, a driver too old), and leaves nothing then.
        """
        with startup_errors(self._name), ExitStack() as resources:
            loop = self._build(resources)
            loop.start()
            self._resources = resources.pop_all()
        self._loop = loop
        log.info("started", extra={"pid": os.getpid()})

    def deliver(self, envelope: Envelope) -> None:
        if self._loop is not None:
            self._loop.deliver(envelope)

    def failure(self) -> str:
        """Why the engine can no longer work; empty while it can work."""
        failure = self._loop.failure if self._loop is not None else None
        if isinstance(failure, EngineStalled):
            return str(failure)
        return "".join(traceback.format_exception(failure)) if failure is not None else ""

    def set_log_level(self, level: LogLevel) -> None:
        set_level(level)

    def pid(self) -> int:
        return os.getpid()

    def start_times(self) -> list[start_times.Phase]:
        """What this process did when while it started."""
        return start_times.phases()

    def stop(self) -> None:
        """Ends the threads and gives shared memory back. Requests that are still here are lost."""
        if self._loop is not None:
            log.info("stops")
            self._loop.stop()
            self._resources.close()
