"""One GenerateMany stream of the gRPC door: reads requests, opens calls, and writes what `ManyCalls` has to say.

A task reads, a task per call waits until that call is open, and the handler's own task writes one message after the
other. While a message is being written, the news of further steps gathers for the next one.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial

import grpc

from protocol.errors import Draining, InvalidRequest, RequestCancelled, RequestError
from router.admission import Account
from router.config import RouterConfig
from router.frontdoor import FrontDoor
from router.grpc_codec import decode_bytes, decode_generate, decode_message
from router.grpc_status import Context, header
from router.many_calls import ManyCall, ManyCalls
from twopass.proto import twopass_pb2 as pb

MAX_ERRORS = 1024
"""With so many errors that the connection has not taken, no further message is read."""


class GrpcMany:
    """Serves one stream with `run`. All methods belong to its event loop."""

    def __init__(
        self, door: FrontDoor, config: RouterConfig, context: Context, account: Callable[[], Account | None]
    ) -> None:
        """`account` returns who calls, or raises a RequestError."""
        self._door, self._config, self._context, self._account = door, config, context, account
        self._traceparent = header(context.invocation_metadata(), "traceparent") or ""
        self._loop = asyncio.get_running_loop()
        self._news, self._sent = asyncio.Event(), asyncio.Event()
        self._calls = ManyCalls(door, self._loop.time, self._news.set)
        self._opening: set[asyncio.Task[None]] = set()
        self._draining = False

    async def run(self, writing: Callable[[bool], None]) -> None:
        """Returns when the client has half-closed and every call has ended. Raises RequestError if the stream cannot go
        on. `writing` is told when a write begins and when it has ended.
        """
        await self._context.send_initial_metadata(())
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                self._news.clear()
                if reading.done():
                    reading.result()  # raises what has broken the stream
                if (message := self._calls.next_message()) is not None:
                    writing(True)
                    await self._context.write(message)
                    writing(False)
                    self._calls.written()
                    self._sent.set()
                elif reading.done() and not self._calls.num_open:
                    return
                elif self._draining and not self._calls.num_open:
                    raise Draining("the deployment is draining")
                else:
                    await self._news.wait()
        finally:
            reading.cancel()
            self._calls.close()

    def drain(self) -> None:
        """Ends the stream when no call is open."""
        self._draining = True
        self._news.set()

    def end_stalled(self, oldest: float) -> None:
        """Ends the calls whose client's user has taken nothing since `oldest`, in seconds of the loop's clock."""
        self._calls.end_stalled(
            oldest, RequestCancelled(f"the client took nothing for {self._config.write_timeout_s:g} s")
        )

    async def _read(self) -> None:
        """Returns when the client has half-closed. Raises RequestError for a message that breaks the contract."""
        while (data := await self._context.read()) is not grpc.aio.EOF:
            message = decode_message(pb.ManyRequest, data)
            match message.WhichOneof("kind"):
                case "start":
                    self._start(message.start)
                case "cancel":
                    self._calls.cancel(message.cancel.call)
                case "credit":
                    self._calls.add_credit(message.credit.call, message.credit.num_tokens)
                case None:
                    raise InvalidRequest("kind", "nothing", "one of start, cancel and credit must be set")
            while self._calls.num_errors >= MAX_ERRORS:
                self._sent.clear()
                await self._sent.wait()

    def _start(self, start: pb.Start) -> None:
        one = self._calls.start(start.call, start.credit)
        if one is not None:
            opening = asyncio.create_task(self._open(one, start))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            one.leave = partial(self._loop.call_soon, opening.cancel)  # not before it has begun: it counts the call

    async def _open(self, one: ManyCall, start: pb.Start) -> None:
        timeout_s = start.timeout_s if start.HasField("timeout_s") else None
        try:
            if timeout_s is not None and not math.isfinite(timeout_s):
                raise InvalidRequest("timeout_s", timeout_s, "a finite number of seconds")
            call = await self._door.open(
                lambda: decode_generate(
                    decode_bytes(pb.GenerateRequest, start.request, self._config.max_message_bytes)
                ),
                one.news,
                deadline_s=timeout_s,
                traceparent=start.traceparent if start.HasField("traceparent") else self._traceparent,
                account=self._account(),
            )
        except RequestError as error:
            self._calls.refused(one, error)
        else:
            self._calls.opened(one, call)
