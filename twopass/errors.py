"""The errors that the client library raises.

TwopassError
├── RequestError              one call ended without its answer; `status` names its gRPC status,
                              `retryable` says whether it may be tried again
│   ├── InvalidRequest        INVALID_ARGUMENT     it can never be served as it is; `field` names what is wrong
│   ├── NotFound              NOT_FOUND            what it names is not there
│   ├── RequestTooLarge       RESOURCE_EXHAUSTED   the message exceeds the server's hard limit
│   ├── Overloaded            RESOURCE_EXHAUSTED   retryable, after `retry_after_s`
│   ├── Unavailable           UNAVAILABLE          retryable: no server, a draining one, or all attempts failed
│   ├── DeadlineExceeded      DEADLINE_EXCEEDED    `timeout_s` passed
│   ├── Cancelled             CANCELLED            by this client, or by the server because this client did not read
│   ├── AccessDenied          UNAUTHENTICATED, PERMISSION_DENIED
│   ├── NotSupported          UNIMPLEMENTED        the server is none of twopass, or an older one
│   └── ServerError           any other status, or an answer that breaks the contract
└── ClientClosed              the client was used after `close`
"""

from collections.abc import Mapping


class TwopassError(Exception):
    """The root of all errors that this library raises on purpose."""

    retryable = False


class RequestError(TwopassError):
    """One call ended without its answer."""

    def __init__(self, message: str, *, status: str) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequest(RequestError):
    """The request can never be served as it is. `field`: the wrong field's name in the contract, or "" if unknown."""

    def __init__(self, message: str, *, field: str = "", status: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message, status=status)
        self.field = field


class NotFound(RequestError):
    """What the request names is not there. The text says what is."""


class RequestTooLarge(RequestError):
    """The message exceeds the server's hard limit."""


class Overloaded(RequestError):
    """The server takes no more requests now. `retry_after_s`: the server's hint, in seconds."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, status: str = "RESOURCE_EXHAUSTED") -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """No server listens there, or it is draining, or all attempts of the request failed."""

    retryable = True


class DeadlineExceeded(RequestError):
    """`timeout_s` passed before the answer was complete."""


class Cancelled(RequestError):
    """The call was cancelled."""


class AccessDenied(RequestError):
    """The server wants credentials, or other ones."""


class NotSupported(RequestError):
    """The server does not know this call."""


class ServerError(RequestError):
    """The server has a bug, or broke the contract."""


class ClientClosed(TwopassError):
    """The client was used after `close`."""


_BY_STATUS: dict[str, type[RequestError]] = {
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "UNIMPLEMENTED": NotSupported,
    "RESOURCE_EXHAUSTED": RequestTooLarge,
}


def from_status(status: str, details: str, metadata: Mapping[str, str]) -> RequestError:
    """Returns the error for a gRPC status other than OK. `metadata`: the call's trailing metadata."""
    if status == "INVALID_ARGUMENT":
        return InvalidRequest(details, field=metadata.get("invalid-field", ""))
    if status == "RESOURCE_EXHAUSTED" and "retry-after-s" in metadata:
        return Overloaded(details, retry_after_s=float(metadata["retry-after-s"]))
    return _BY_STATUS.get(status, ServerError)(details or status, status=status)
