"""The client library of twopass, a disaggregated LLM-serving system. It needs grpcio and protobuf only."""

from twopass.client import AsyncClient, Client
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
from twopass.stream import AsyncStream, Stream
from twopass.types import (
    Chunk,
    Completion,
    GenerateOptions,
    Loads,
    ModelInfo,
    ReplicaLoad,
    ServerInfo,
    Timing,
    TokenLogprobs,
    Usage,
)

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
    "GenerateOptions",
    "InvalidRequest",
    "Loads",
    "ModelInfo",
    "NotSupported",
    "Overloaded",
    "ReplicaLoad",
    "RequestError",
    "RequestTooLarge",
    "ServerError",
    "ServerInfo",
    "Stream",
    "Timing",
    "TokenLogprobs",
    "TwopassError",
    "Unavailable",
    "Usage",
]
