"""Talks to a twopass server.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=32, temperature=0.0):
            print(chunk.text, end="")

`generate` and `chat` stream; `generate_text` and `chat_text` wait for the whole answer, `generate_texts` and
`chat_texts` for all `n` answers. `AsyncClient` does the same with `async`. All calls raise the errors of
`twopass.errors`. Closing a stream, or dropping it, cancels the request.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from twopass.connect import MAX_TRIES, Pem, Security
from twopass.proto import twopass_pb2 as pb
from twopass.servers import Servers
from twopass.stream import AsyncStream, Stream
from twopass.types import Chunk, Completion, GenerateOptions, Loads, ModelInfo, ServerInfo, Timing, Usage
from twopass.wire import (
    abort_request,
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


class Client:
    """Connections that any number of threads may share.

    `address`: one or several, see connect.py. `timeout_s`: seconds that each call may take unless it names its own;
    None sets no deadline. `token`: a bearer token. For TLS (`grpcs://`), each as a PEM file or what it holds: `ca`, the
    authorities to trust instead of the system's; `cert` and `key`, where the server wants a certificate. `max_tries`:
    how often each address is tried before a call fails with Unavailable.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        max_tries: int = MAX_TRIES,
    ) -> None:
        self._servers = Servers(address, Security(token, ca, cert, key), max_tries, grpc)
        self._timeout_s = timeout_s

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
        return list(self._call("Tokenize", tokenize_request(text, messages)).token_ids)

    def model_info(self) -> ModelInfo:
        """Returns what is served."""
        return to_model_info(self._call("GetModelInfo", pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        """Returns what runs on the server, and whether it takes requests."""
        return to_server_info(self._call("GetServerInfo", pb.GetServerInfoRequest()))

    def loads(self) -> Loads:
        """Returns how busy every engine is, as of its last report."""
        return to_loads(self._call("GetLoads", pb.GetLoadsRequest()))

    def abort(self, request_id: str) -> bool:
        """Ends an open request of any client; its stream raises Cancelled. Returns False if no such request is open."""
        return bool(self._call("Abort", abort_request(request_id)).aborted)

    def close(self) -> None:
        """Cancels open requests and closes the connection."""
        for channel in self._servers.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> Stream:
        servers, tries = self._servers, self._servers.tries(options.get("timeout_s", self._timeout_s))
        start = servers.generate_starter(request, options)
        return Stream(start(tries), start, tries, servers.places)

    def _call(self, method: str, request: Any) -> Any:
        servers, tries = self._servers, self._servers.tries(self._timeout_s)
        start = servers.starter(method, request)
        while True:
            place = servers.places[tries.place]
            try:
                return start(tries)
            except grpc.RpcError as error:
                wait_s = tries.wait_s(error.code().name)
                if wait_s is None:
                    raise to_error(error, place) from error
                time.sleep(wait_s)


class AsyncClient:
    """Works like `Client`, for one event loop."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        max_tries: int = MAX_TRIES,
    ) -> None:
        self._servers = Servers(address, Security(token, ca, cert, key), max_tries, grpc.aio)
        self._timeout_s = timeout_s

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
        return list((await self._call("Tokenize", tokenize_request(text, messages))).token_ids)

    async def model_info(self) -> ModelInfo:
        """Returns what is served."""
        return to_model_info(await self._call("GetModelInfo", pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        """Returns what runs on the server, and whether it takes requests."""
        return to_server_info(await self._call("GetServerInfo", pb.GetServerInfoRequest()))

    async def loads(self) -> Loads:
        """Returns how busy every engine is, as of its last report."""
        return to_loads(await self._call("GetLoads", pb.GetLoadsRequest()))

    async def abort(self, request_id: str) -> bool:
        """Ends an open request of any client; its stream raises Cancelled. Returns False if no such request is open."""
        return bool((await self._call("Abort", abort_request(request_id))).aborted)

    async def close(self) -> None:
        """Cancels open requests and closes the connection."""
        for channel in self._servers.channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> AsyncStream:
        servers, tries = self._servers, self._servers.tries(options.get("timeout_s", self._timeout_s))
        start = servers.generate_starter(request, options)
        return AsyncStream(start(tries), start, tries, servers.places)

    async def _call(self, method: str, request: Any) -> Any:
        servers, tries = self._servers, self._servers.tries(self._timeout_s)
        start = servers.starter(method, request)
        while True:
            place = servers.places[tries.place]
            try:
                return await start(tries)
            except grpc.RpcError as error:
                wait_s = tries.wait_s(error.code().name)
                if wait_s is None:
                    raise to_error(error, place) from error
                await asyncio.sleep(wait_s)
