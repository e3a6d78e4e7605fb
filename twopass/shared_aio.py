"""The same as shared.py for one event loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from twopass.many import CANCELLED, DEADLINE, ENDED, CallFailed, News, OpenCalls, stream_failure
from twopass.proto import twopass_pb2 as pb
from twopass.shared import Metadata


class AsyncSharedCall:
    def __init__(
        self, calls: OpenCalls, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> None:
        self._calls, self._news = calls, asyncio.Queue[News]()
        self._until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._last: CallFailed | None = None
        self._call = calls.start(request, self._news.put_nowait, timeout_s, traceparent)

    async def read(self) -> Any:
        """Returns the next message, or grpc.aio.EOF."""
        if self._last is None:
            news = await self._next_news()
            if isinstance(news, pb.GenerateResponse):
                self._calls.took(self._call, len(news.token_ids))
                return news
            self._last = news
        if self._last is ENDED:
            return grpc.aio.EOF
        raise self._last.anew()

    def cancel(self) -> None:
        self._calls.cancel(self._call)

    async def _next_news(self) -> News:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._news.get()
        except TimeoutError:
            self._calls.cancel(self._call)
            return DEADLINE


class AsyncSharedStream:
    """One stream, whose messages a task of its own hands out. It ends with its channel."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        """Raises grpc.aio.UsageError if the channel is closed."""
        requests = asyncio.Queue[pb.ManyRequest]()
        self.calls = OpenCalls(requests.put_nowait)
        responses = stub.GenerateMany(_each(requests), metadata=metadata)
        self._task = asyncio.create_task(_hand_out(responses, self.calls))

    def start(self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None) -> AsyncSharedCall:
        return AsyncSharedCall(self.calls, request, timeout_s, traceparent)


async def _each(requests: asyncio.Queue[pb.ManyRequest]) -> AsyncIterator[pb.ManyRequest]:
    while True:
        yield await requests.get()


async def _hand_out(responses: Any, calls: OpenCalls) -> None:
    failure = CANCELLED
    try:
        async for message in responses:
            calls.receive(message)
    except grpc.RpcError as error:
        failure = stream_failure(error)
    except asyncio.CancelledError:  # how gRPC tells that the channel was closed
        pass
    finally:
        calls.fail(failure)
