"""twopass: a client for disaggregated LLM serving. Needs grpcio and protobuf only."""

from twopass.client import AsyncClient, AsyncStream, Client, Stream
from twopass.errors import (
    AccessDenied,
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    NotSupported,
    Overloaded,
    RequestError,
    RequestTooLarge,
    ServerError,
    TwopassError,
    Unavailable,
)
from twopass.wire import Chunk, Completion, ModelInfo, Timing, Usage

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientClosed",
    "Completion",
    "DeadlineExceeded",
    "InvalidRequest",
    "ModelInfo",
    "NotSupported",
    "Overloaded",
    "RequestError",
    "RequestTooLarge",
    "ServerError",
    "Stream",
    "Timing",
    "TwopassError",
    "Unavailable",
    "Usage",
]
