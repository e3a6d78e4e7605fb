"""How every door tells an error: gRPC status, HTTP status, OpenAI's name for its kind, and a hint when to retry.

The rows are the codes of protocol/errors.py. A code without a row stands for a bug of ours.
"""

from typing import NamedTuple

from protocol.errors import Overloaded, RequestError

RETRY_AFTER_S = 1.0
"""What a client is told to wait whose request may be tried again, if the error does not say it."""


class Row(NamedTuple):
    http_status: int
    kind: str
    """The `type` of an error in OpenAI's dialect."""


ROWS: dict[str, Row] = {
    "INVALID_ARGUMENT": Row(400, "invalid_request_error"),
    "UNAUTHENTICATED": Row(401, "authentication_error"),
    "NOT_FOUND": Row(404, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": Row(429, "rate_limit_error"),
    "CANCELLED": Row(499, "cancelled"),
    "INTERNAL": Row(500, "server_error"),
    "UNAVAILABLE": Row(503, "service_unavailable"),
    "DEADLINE_EXCEEDED": Row(504, "timeout"),
}


def row_of(error: RequestError) -> Row:
    return ROWS[error.code]


def retry_after_s(error: RequestError) -> float | None:
    """After how many seconds to try again, or None if that cannot help."""
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return RETRY_AFTER_S if error.retryable else None
