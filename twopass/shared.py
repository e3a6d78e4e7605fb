"""Calls that share a GenerateMany stream. Each looks like a call of gRPC's own to those who read it."""

import time
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import grpc

from twopass.many import CANCELLED, DEADLINE, ENDED, CallFailed, News, OpenCalls, stream_failure
from twopass.proto import twopass_pb2 as pb

Metadata = tuple[tuple[str, str], ...]


class SharedCall:
    """Any thread may iterate it, and any other cancel it."""

    def __init__(
        self, calls: OpenCalls, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> None:
        self._calls, self._news = calls, SimpleQueue[News]()
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._last: CallFailed | None = None
        self._call = calls.start(request, self._news.put, timeout_s, traceparent)

    def __next__(self) -> pb.GenerateResponse:
        if self._last is None:
            news = self._next_news()
            if isinstance(news, pb.GenerateResponse):
                self._calls.took(self._call, len(news.token_ids))
                return news
            self._last = news
        if self._last is ENDED:
            raise StopIteration
        raise self._last.anew()

    def code(self) -> grpc.StatusCode:
        return self._ended().code()

    def details(self) -> str:
        return self._ended().details()

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._ended().trailing_metadata()

    def cancel(self) -> None:
        self._calls.cancel(self._call)

    def _ended(self) -> CallFailed:
        assert self._last is not None, "asked for once `__next__` has raised"
        return self._last

    def _next_news(self) -> News:
        try:
            return self._news.get(timeout=None if self._until is None else max(0.0, self._until - time.monotonic()))
        except Empty:
            self._calls.cancel(self._call)
            return DEADLINE


class SharedStream:
    """One stream, whose messages a thread of its own hands out. It ends with its channel, or when nobody holds it."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        """Raises ValueError if the channel is closed."""
        requests = SimpleQueue[pb.ManyRequest | None]()
        self.calls = OpenCalls(requests.put)
        self._responses = stub.GenerateMany(iter(requests.get, None), metadata=metadata)
        hand_out = Thread(
            target=_hand_out, args=(self._responses, self.calls, requests), name="twopass answers", daemon=True
        )
        hand_out.start()

    def start(self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None) -> SharedCall:
        return SharedCall(self.calls, request, timeout_s, traceparent)

    def __del__(self) -> None:
        if (responses := getattr(self, "_responses", None)) is not None:  # None on a closed channel
            responses.cancel()


def _hand_out(responses: Any, calls: OpenCalls, requests: SimpleQueue[pb.ManyRequest | None]) -> None:
    failure = CANCELLED
    try:
        for message in responses:
            calls.receive(message)
    except grpc.RpcError as error:
        failure = stream_failure(error)
    finally:
        calls.fail(failure)
        requests.put(None)  # ends the thread of gRPC's that waits for what goes up
