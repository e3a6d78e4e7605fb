"""The client's end of one GenerateMany stream: which calls are open, what goes up, and whose news a message brings.

Nothing here waits or knows threads but for one lock: calls begin in the order of their numbers. `twopass/shared.py`
moves the messages.

Each call may have CREDIT tokens under way; what its user reads is allowed again, half of them at a time. So an answer
that nobody reads stops at the server, and the others go on.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from twopass.proto import twopass_pb2 as pb

CREDIT = 512
"""Tokens of one call that may be under way to its user."""
LAST_CALL = 2**31 - 1
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class CallFailed(grpc.RpcError):  # type: ignore[misc]  # grpcio ships no types
    """The end of a call that is not gRPC's own, told as gRPC tells its own."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def anew(self) -> "CallFailed":
        """The same, to be raised: what is raised again and again gathers the frames of all who raised it."""
        return CallFailed(self._code, self._details, self._metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


ENDED = CallFailed(grpc.StatusCode.OK, "")
"""Comes last where a call ends well."""
CANCELLED = CallFailed(grpc.StatusCode.CANCELLED, "the client has cancelled the call")
DEADLINE = CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's time is over")
NOT_SHARED = CallFailed(grpc.StatusCode.UNAVAILABLE, "the server knows no GenerateMany")
"""Ends calls of a stream that an older server refuses: they may be started again."""
News = pb.GenerateResponse | CallFailed
"""A piece of an answer, or the end."""


@dataclass(slots=True)
class OpenCall:
    """`deliver`: takes its news, in the thread that reads the stream."""

    number: int
    deliver: Callable[[News], object]
    unpaid: int = 0
    """Tokens that were read and are not allowed again yet."""


@dataclass(slots=True)
class OpenCalls:
    """The calls of one stream. `send` puts a message on its way and does not wait."""

    send: Callable[[pb.ManyRequest], object]
    _calls: dict[int, OpenCall] = field(default_factory=dict)
    _last: int = -1
    _failure: CallFailed | None = None
    """Why the stream has ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_open(self) -> int:
        return len(self._calls)

    @property
    def unknown(self) -> bool:
        """Whether the server knows no such streams."""
        return self._failure is NOT_SHARED

    @property
    def usable(self) -> bool:
        """Whether further calls may begin."""
        return self._failure is None and self._last < LAST_CALL

    def start(
        self,
        request: pb.GenerateRequest,
        deliver: Callable[[News], object],
        timeout_s: float | None,
        traceparent: str | None,
    ) -> OpenCall:
        """Begins a call. On a stream that has ended meanwhile it fails at once, as all others have."""
        start = pb.Start(request=request.SerializeToString(), credit=CREDIT, timeout_s=timeout_s)
        if traceparent is not None:
            start.traceparent = traceparent
        with self._lock:
            self._last += 1
            call = OpenCall(self._last, deliver)
            if self._failure is not None:
                deliver(self._failure)
                return call
            self._calls[call.number] = call
            start.call = call.number
            self.send(pb.ManyRequest(start=start))
        return call

    def cancel(self, call: OpenCall) -> None:
        """Ends a call, if it is open, with CANCELLED."""
        if self._end(call, CANCELLED):
            self.send(pb.ManyRequest(cancel=pb.Cancel(call=call.number)))

    def took(self, call: OpenCall, num_tokens: int) -> None:
        """The call's user has read so many tokens."""
        call.unpaid += num_tokens
        if call.unpaid >= CREDIT // 2 and call.number in self._calls:
            self.send(pb.ManyRequest(credit=pb.Credit(call=call.number, num_tokens=call.unpaid)))
            call.unpaid = 0

    def receive(self, message: pb.ManyResponse) -> None:
        """Hands each call its news. Calls that this end has cancelled may still have some."""
        calls, first = self._calls, 0
        indexes, counts, token_ids = message.indexes, message.counts, message.token_ids
        for row, number in enumerate(message.calls):
            num = counts[row] if counts else 1
            if (call := calls.get(number)) is not None:
                index = indexes[row] if indexes else 0
                ids = token_ids[first : first + num]
                call.deliver(pb.GenerateResponse(text=message.texts[row], token_ids=ids, index=index))
            first += num
        for one in message.responses:
            if (call := calls.get(one.call)) is not None:
                call.deliver(one.response)
                if one.response.HasField("usage"):
                    self._end(call, ENDED)
        for error in message.errors:
            if (call := calls.get(error.call)) is not None:
                self._end(call, _failed(error))

    def fail(self, failure: CallFailed) -> None:
        """The stream has ended: so have all its calls."""
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            failure = NOT_SHARED
        with self._lock:
            self._failure = failure
            ended, self._calls = list(self._calls.values()), {}
        for call in ended:
            call.deliver(failure)

    def _end(self, call: OpenCall, last: CallFailed) -> bool:
        if self._calls.pop(call.number, None) is None:
            return False
        call.deliver(last)
        return True


def stream_failure(error: Any) -> CallFailed:
    """What a stream that ended with this grpc.RpcError means to its calls."""
    return CallFailed(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def _failed(error: pb.CallError) -> CallFailed:
    metadata: tuple[tuple[str, str], ...] = ()
    if error.HasField("invalid_field"):
        metadata = (("invalid-field", error.invalid_field),)
    if error.HasField("retry_after_s"):
        metadata = (("retry-after-s", f"{error.retry_after_s:g}"),)
    return CallFailed(_STATUS.get(error.code, grpc.StatusCode.UNKNOWN), error.text, metadata)
