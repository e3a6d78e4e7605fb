"""The chunks of one call as they arrive. Closing a stream, or dropping it, cancels the request.

A call that ends with UNAVAILABLE before its first chunk is started again, see connect.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from twopass.connect import Place, Tries
from twopass.types import Chunk, Completion
from twopass.wire import incomplete, join, single, to_chunk, to_error


class Stream(Iterator[Chunk]):
    """The stream of one call. Iterate it, `read` the rest, or `close` it to cancel the request."""

    def __init__(self, call: Any, start: Callable[[Tries], Any], tries: Tries, places: Sequence[Place]) -> None:
        """`start` has started `call`, at the place that is tried."""
        self._start, self._tries, self._places = start, tries, places
        self._place, self._call = places[tries.place], call
        self._begun = self._ended = self._closed = False

    def __next__(self) -> Chunk:
        while True:
            try:
                message = next(self._call)
            except StopIteration:
                if not self._ended:
                    raise incomplete() from None
                raise
            except grpc.RpcError as error:
                wait_s = None if self._begun else self._tries.wait_s(self._call.code().name)
                if wait_s is not None:
                    time.sleep(wait_s)
                if wait_s is None or self._closed:
                    raise to_error(self._call, self._place) from error
                self._place, self._call = self._places[self._tries.place], self._start(self._tries)
                continue
            self._begun = True
            chunk = to_chunk(message)
            self._ended = chunk.usage is not None
            return chunk

    def read(self) -> Completion:
        """Waits for the end and joins all chunks that were not iterated yet."""
        return single(self.read_all())

    def read_all(self) -> list[Completion]:
        """Works like `read`, for `n` answers."""
        with self:
            return join(list(self))

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """Works like `Stream`, for an event loop. `aclose` cancels the request."""

    def __init__(self, call: Any, start: Callable[[Tries], Any], tries: Tries, places: Sequence[Place]) -> None:
        self._start, self._tries, self._places = start, tries, places
        self._place, self._call = places[tries.place], call
        self._begun = self._ended = self._closed = False

    async def __anext__(self) -> Chunk:
        while True:
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                wait_s = None if self._begun else self._tries.wait_s(error.code().name)
                if wait_s is not None:
                    await asyncio.sleep(wait_s)
                if wait_s is None or self._closed:
                    raise to_error(error, self._place) from error
                self._place, self._call = self._places[self._tries.place], self._start(self._tries)
                continue
            if message is grpc.aio.EOF:
                if not self._ended:
                    raise incomplete()
                raise StopAsyncIteration
            self._begun = True
            chunk = to_chunk(message)
            self._ended = chunk.usage is not None
            return chunk

    async def read(self) -> Completion:
        """Waits for the end and joins all chunks that were not iterated yet."""
        return single(await self.read_all())

    async def read_all(self) -> list[Completion]:
        """Works like `read`, for `n` answers."""
        async with self:
            return join([chunk async for chunk in self])

    async def aclose(self) -> None:
        """Cancels the request unless it has ended."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()
