"""The tree of errors. The router maps each leaf to a gRPC status; `retryable` says whether trying again can help.

TwopassError
├── RequestError                  one request; nobody else is harmed
│   ├── InvalidRequest            INVALID_ARGUMENT    no    names field, value and limit
│   ├── NotFound                  NOT_FOUND           no    names field, value and what there is
│   ├── Unauthenticated           UNAUTHENTICATED     no    no token, or one that nobody knows
│   ├── Overloaded                RESOURCE_EXHAUSTED  yes   names when to retry
│   ├── Draining                  UNAVAILABLE         yes
│   ├── DeadlineExceeded          DEADLINE_EXCEEDED   no
│   ├── RequestCancelled          CANCELLED           no
│   └── RequestFailed             UNAVAILABLE         yes   all attempts were spent
├── StartupError                  nothing was started
│   ├── ConfigError               an unknown key, a bad value, knobs that contradict each other
│   ├── ModelError                missing or damaged weights, unknown architecture
│   └── CapacityError             memory, shared memory or a port is not to be had
├── TransferError                 one KV transfer; the attempt fails, the request is retried
│   ├── LayoutMismatch            the two caches do not look alike
│   ├── PullFailed                bytes did not arrive
│   ├── LeaseLost                 they arrived, but the lease word had changed
│   └── ChecksumMismatch          they arrived changed
├── ClusterLost                   the Ray under a running deployment died, and it ends
├── EngineStalled                 a step does not end; its engine is replaced
└── ProtocolError                 a bug: a message or transition that no table lists
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class TwopassError(Exception):
    """The root of all errors that twopass raises on purpose."""

    retryable = False


class RequestError(TwopassError):
    """Ends one request; `code` is the name of its gRPC status."""

    code = "INTERNAL"


class InvalidRequest(RequestError):
    """The request can never be served as asked.

    `field` is the name as the user wrote it, `value` what was given (the caller shortens long values), and `limit` the
    rule that was broken, in words or numbers.
    """

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: {value} is not allowed: {limit}")
        self.field, self.value, self.limit = field, value, limit


class NotFound(RequestError):
    """What the request names is not here. `limit`: what there is instead."""

    code = "NOT_FOUND"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: {value} is not found: {limit}")
        self.field = field


class Unauthenticated(RequestError):
    """Who calls has no token that is known here."""

    code = "UNAUTHENTICATED"


class Overloaded(RequestError):
    """Every place in the queue is taken. `retry_after_s` hints after how many seconds to try again."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(f"{message}; retry in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Draining(RequestError):
    """The deployment is going down and takes no new requests."""

    code = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before its answer was complete."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelled(RequestError):
    """The client went away or asked to stop."""

    code = "CANCELLED"


class RequestFailed(RequestError):
    """Every attempt failed."""

    code = "UNAVAILABLE"
    retryable = True


class StartupError(TwopassError):
    """The deployment cannot start; nothing was left running."""


@contextmanager
def startup_errors(name: str) -> Iterator[None]:
    """What the process `name` raises while it starts becomes a StartupError that says what it was: its supervisor can
    tell a start that failed from a bug of its own, and needs none of the libraries that raised.
    """
    try:
        yield
    except StartupError:
        raise
    except Exception as error:  # the border of a process: everything is reported
        log.exception("the start failed")
        raise StartupError(f"{name}: {type(error).__name__}: {error}") from None


class ConfigError(StartupError):
    """A key or value in the configuration is wrong."""


class ModelError(StartupError):
    """The model directory cannot be served."""


class CapacityError(StartupError):
    """The machine lacks memory, shared memory or a free port."""


class TransferError(TwopassError):
    """One KV transfer went wrong."""

    retryable = True


class LayoutMismatch(TransferError):
    """Two caches with unequal layout fingerprints were about to be paired."""

    retryable = False


class PullFailed(TransferError):
    """The bytes of a pull did not arrive."""


class LeaseLost(TransferError):
    """When the bytes had arrived, the lease word no longer named this lease."""


class ChecksumMismatch(TransferError):
    """The bytes that arrived are not those that the prefill engine had offered."""


class ClusterLost(TwopassError):
    """The Ray that carries a deployment has lost a part of its own, so that nothing can be watched or replaced."""


class EngineStalled(TwopassError):
    """A step has been running for longer than any step may."""


class ProtocolError(TwopassError):
    """A message or transition that no table of the protocol lists: a bug in this code."""
