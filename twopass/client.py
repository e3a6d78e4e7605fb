"""Talks to a twopass server.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=32, temperature=0.0):
            print(chunk.text, end="")

`generate` and `chat` stream; `generate_text` and `chat_text` wait for the whole answer, `generate_texts` and
`chat_texts` for all `n` answers. `AsyncClient` does the same with `async`. All calls raise the errors of
`twopass.errors`. Closing a stream, or dropping it, cancels the request.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from twopass.errors import ClientClosed
from twopass.proto import twopass_pb2 as pb
from twopass.proto.twopass_pb2_grpc import TwopassStub
from twopass.proxy import is_loopback
from twopass.stream import AsyncStream, Stream
from twopass.types import Chunk, Completion, GenerateOptions, Loads, ModelInfo, ServerInfo, Timing, Usage
from twopass.wire import (
    abort_request,
    call_metadata,
    generate_request,
    require_single,
    to_error,
    to_loads,
    to_model_info,
    to_server_info,
    tokenize_request,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "GenerateOptions",
    "ModelInfo",
    "Stream",
    "Timing",
    "Usage",
]

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the server says what is too large
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def _channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """Connections to this machine use no proxy, whatever the environment says."""
    return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_loopback(address) else _CHANNEL_OPTIONS


class Client:
    """A connection that any number of threads may share. `timeout_s`: seconds that each call may take unless it names
    its own; None sets no deadline.
    """

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=_channel_options(address))
        self._stub = TwopassStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._address, self._timeout_s = address, timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Streams the continuation of a text or of token ids. The request starts now, not when it is iterated."""
        return self._start(generate_request(prompt, prompt_token_ids, None, options), options)

    def chat(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> Stream:
        """Streams the assistant's answer to messages of `role` and `content`."""
        return self._start(generate_request(None, None, messages, options), options)

    def generate_text(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Works like `generate`, but waits for the whole answer."""
        require_single(options)
        return self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read()

    def generate_texts(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Works like `generate`, but waits for all `n` answers."""
        return self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read_all()

    def chat_text(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> Completion:
        """Works like `chat`, but waits for the whole answer."""
        require_single(options)
        return self.chat(messages, **options).read()

    def chat_texts(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Works like `chat`, but waits for all `n` answers."""
        return self.chat(messages, **options).read_all()

    def tokenize(self, text: str | None = None, *, messages: Iterable[Mapping[str, str]] | None = None) -> list[int]:
        """Returns the token ids that the server would use for this prompt."""
        return list(self._call(self._stub.Tokenize, tokenize_request(text, messages)).token_ids)

    def model_info(self) -> ModelInfo:
        """Returns what is served."""
        return to_model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        """Returns what runs on the server, and whether it takes requests."""
        return to_server_info(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def loads(self) -> Loads:
        """Returns how busy every engine is, as of its last report."""
        return to_loads(self._call(self._stub.GetLoads, pb.GetLoadsRequest()))

    def abort(self, request_id: str) -> bool:
        """Ends an open request of any client; its stream raises Cancelled. Returns False if no such request is open."""
        return bool(self._call(self._stub.Abort, abort_request(request_id)).aborted)

    def close(self) -> None:
        """Cancels open requests and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> Stream:
        try:
            call = self._stub.Generate(
                request, timeout=options.get("timeout_s", self._timeout_s), metadata=call_metadata(options)
            )
            return Stream(call, self._address)
        except ValueError as error:  # grpc raises it on a closed channel
            raise ClientClosed(str(error)) from error

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise to_error(error, self._address) from error
        except ValueError as error:
            raise ClientClosed(str(error)) from error


class AsyncClient:
    """Works like `Client`, for one event loop."""

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_channel_options(address))
        self._stub = TwopassStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._address, self._timeout_s = address, timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Streams the continuation of a text or of token ids. The request starts now, not when it is iterated."""
        return self._start(generate_request(prompt, prompt_token_ids, None, options), options)

    def chat(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Streams the assistant's answer to messages of `role` and `content`."""
        return self._start(generate_request(None, None, messages, options), options)

    async def generate_text(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Works like `generate`, but waits for the whole answer."""
        require_single(options)
        return await self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read()

    async def generate_texts(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Works like `generate`, but waits for all `n` answers."""
        return await self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read_all()

    async def chat_text(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> Completion:
        """Works like `chat`, but waits for the whole answer."""
        require_single(options)
        return await self.chat(messages, **options).read()

    async def chat_texts(
        self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Works like `chat`, but waits for all `n` answers."""
        return await self.chat(messages, **options).read_all()

    async def tokenize(
        self, text: str | None = None, *, messages: Iterable[Mapping[str, str]] | None = None
    ) -> list[int]:
        """Returns the token ids that the server would use for this prompt."""
        return list((await self._call(self._stub.Tokenize, tokenize_request(text, messages))).token_ids)

    async def model_info(self) -> ModelInfo:
        """Returns what is served."""
        return to_model_info(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        """Returns what runs on the server, and whether it takes requests."""
        return to_server_info(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    async def loads(self) -> Loads:
        """Returns how busy every engine is, as of its last report."""
        return to_loads(await self._call(self._stub.GetLoads, pb.GetLoadsRequest()))

    async def abort(self, request_id: str) -> bool:
        """Ends an open request of any client; its stream raises Cancelled. Returns False if no such request is open."""
        return bool((await self._call(self._stub.Abort, abort_request(request_id))).aborted)

    async def close(self) -> None:
        """Cancels open requests and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> AsyncStream:
        try:
            call = self._stub.Generate(
                request, timeout=options.get("timeout_s", self._timeout_s), metadata=call_metadata(options)
            )
            return AsyncStream(call, self._address)
        except grpc.aio.UsageError as error:
            raise ClientClosed(str(error)) from error

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise to_error(error, self._address) from error
        except grpc.aio.UsageError as error:
            raise ClientClosed(str(error)) from error
