"""What the gRPC handlers share: the context of a call, and how an error becomes its status."""

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from protocol.errors import InvalidRequest, RequestError
from router.error_table import retry_after_s
from twopass.proto import twopass_pb2 as pb

MAX_DETAILS_BYTES = 800
"""Longest text of an error. With its copies in the metadata it must fit into the 8 KB of headers a client takes."""


class Context(Protocol):
    """The part of `grpc.aio.ServicerContext` that is used here; grpcio ships no types."""

    def time_remaining(self) -> float | None: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...
    async def send_initial_metadata(self, initial_metadata: tuple[tuple[str, str | bytes], ...]) -> None: ...
    async def read(self) -> Any:
        """Returns the next message as bytes, or grpc.aio.EOF."""
        ...

    async def write(self, message: Message) -> None: ...
    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]
    ) -> NoReturn: ...


def header(metadata: Iterable[tuple[str, str | bytes]], wanted: str) -> str | None:
    return next((value for name, value in metadata if name == wanted and isinstance(value, str)), None)


def status_text(error: RequestError) -> str:
    return str(error).encode("utf-8", "replace")[:MAX_DETAILS_BYTES].decode("utf-8", "ignore")


async def abort(context: Context, error: RequestError) -> NoReturn:
    """Ends the call with the error's status. A hint when to retry, or the wrong field, goes into the trailing metadata,
    as plain text and as google.rpc.Status.
    """
    code, text = grpc.StatusCode[error.code], status_text(error)
    status = status_pb2.Status(code=code.value[0], message=text)
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if (hint_s := retry_after_s(error)) is not None:
        metadata = (("retry-after-s", f"{hint_s:g}"),)
        delay = Duration(seconds=int(hint_s), nanos=int(hint_s % 1 * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    elif isinstance(error, InvalidRequest):
        metadata = (("invalid-field", error.field),)
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if status.details:
        metadata += (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, text, metadata)


def call_error(call: int, error: RequestError) -> pb.CallError:
    """The same for one call of many."""
    message = pb.CallError(call=call, code=grpc.StatusCode[error.code].value[0], text=status_text(error))
    if (hint_s := retry_after_s(error)) is not None:
        message.retry_after_s = hint_s
    elif isinstance(error, InvalidRequest):
        message.invalid_field = error.field
    return message
