"""What both gRPC services do alike: how a port is opened, and how a call is read and refused."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health

from protocol.errors import CapacityError, RequestError
from router.accounts import Accounts
from router.grpc_codec import decode_bytes
from router.grpc_status import Context, abort, header
from router.tls import Certificates

M = TypeVar("M", bound=Message)


def bind(server: Any, knob: str, host: str, port: int, certificates: Certificates | None) -> int:
    """Opens a server's port and returns it. Raises CapacityError, with the knob's name, if it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, certificates.credentials()))
    except RuntimeError as error:
        raise CapacityError(f"{knob}: {address} is taken, or not an address of this machine") from error


def unary(
    kind: type[M], answer: Callable[[Callable[[], M]], Awaitable[Message]], max_message_bytes: int
) -> grpc.RpcMethodHandler:
    """Returns a handler of a call with one answer. `answer` gets a function that parses its request."""

    async def handle(data: bytes, context: Context) -> Message:
        try:
            return await answer(partial(decode_bytes, kind, data, max_message_bytes))
        except RequestError as error:
            await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=lambda message: message.SerializeToString())


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Refuses calls without a token, but for health, which load balancers ask for, and for methods that look the token
    up themselves, because they must know whose call it is.
    """

    def __init__(self, accounts: Accounts, *, but: Sequence[str] = ()) -> None:
        self._accounts, self._but = accounts, frozenset(but)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        method = details.method
        if handler is None or method in self._but or method.startswith(f"/{health.SERVICE_NAME}/"):
            return handler
        try:
            self._accounts.authenticate(header(details.invocation_metadata, "authorization"))
        except RequestError as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: Any, error: RequestError) -> grpc.RpcMethodHandler:
    """A handler of the same kind of call, which ends it with the error."""

    async def refuse(request: Any, context: Context) -> NoReturn:
        await abort(context, error)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
