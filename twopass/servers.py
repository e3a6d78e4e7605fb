"""A client's channels to its servers, and how it starts calls there.

A call that is alone goes by Generate. Calls beside others share a stream by GenerateMany: one message per step then has
the news of all of them, which costs both ends a fraction of a stream each.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from twopass.connect import Security, Tries, open_channel, places
from twopass.errors import ClientClosed
from twopass.proto import twopass_pb2 as pb
from twopass.proto.twopass_pb2_grpc import TwopassStub
from twopass.shared import Metadata, SharedStream
from twopass.shared_aio import AsyncSharedStream
from twopass.types import GenerateOptions
from twopass.wire import call_metadata


class Servers:
    """The channels to all addresses. `module`: grpc or grpc.aio."""

    def __init__(self, address: str | Sequence[str], security: Security, max_tries: int, module: Any) -> None:
        self.places, self._max_tries = places(address), max_tries
        self.channels = [open_channel(place, security, module) for place in self.places]
        stubs = [TwopassStub(channel) for channel in self.channels]  # type: ignore[no-untyped-call]  # generated
        self._servers = [_Server(stub, call_metadata(security.token), module) for stub in stubs]
        self._turns = itertools.count()

    def tries(self, timeout_s: float | None) -> Tries:
        """Those of the next call."""
        return Tries(len(self.places), next(self._turns), self._max_tries, timeout_s)

    def starter(self, method: str, request: Any) -> Callable[[Tries], Any]:
        """Starts the call where it is tried, and raises ClientClosed if the client is closed."""
        return _unless_closed(lambda tries: self._servers[tries.place].call(method, request, tries.timeout_s))

    def generate_starter(self, request: pb.GenerateRequest, options: GenerateOptions) -> Callable[[Tries], Any]:
        """The same for a call of Generate, or of GenerateMany."""
        traceparent = options.get("traceparent")

        def start(tries: Tries) -> Any:
            beside = any(server.num_open for server in self._servers)
            return self._servers[tries.place].generate(request, tries.timeout_s, traceparent, share=beside)

        return _unless_closed(start)


def _unless_closed(start: Callable[[Tries], Any]) -> Callable[[Tries], Any]:
    def start_or_say(tries: Tries) -> Any:
        try:
            return start(tries)
        except (ValueError, grpc.aio.UsageError) as error:  # what grpc raises on a closed channel
            raise ClientClosed(str(error)) from error

    return start_or_say


class _Server:
    """One server. Threads may share it."""

    def __init__(self, stub: Any, metadata: Metadata, module: Any) -> None:
        self._stub, self._metadata = stub, metadata
        self._aio = module is grpc.aio
        self._lock = threading.Lock()
        self._num_alone = 0
        """Open calls of Generate."""
        self._shared: SharedStream | AsyncSharedStream | None = None

    @property
    def num_open(self) -> int:
        """How many answers are under way."""
        return self._num_alone + (self._shared.calls.num_open if self._shared is not None else 0)

    def call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None, *, share: bool
    ) -> Any:
        if share and (stream := self._stream()) is not None:
            return stream.start(request, timeout_s, traceparent)
        metadata = self._metadata if traceparent is None else (*self._metadata, ("traceparent", traceparent))
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        with self._lock:
            self._num_alone += 1
        if self._aio:
            call.add_done_callback(self._alone_ended)
        elif not call.add_callback(self._alone_ended):  # it has ended already
            self._alone_ended()
        return call

    def _alone_ended(self, *_: object) -> None:
        with self._lock:
            self._num_alone -= 1

    def _stream(self) -> SharedStream | AsyncSharedStream | None:
        """The stream that calls share, or None if the server knows none."""
        with self._lock:
            if self._shared is not None and self._shared.calls.unknown:
                return None
            if self._shared is None or not self._shared.calls.usable:
                self._shared = (AsyncSharedStream if self._aio else SharedStream)(self._stub, self._metadata)
            return self._shared
