"""Talks to a twopass server.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=32, temperature=0.0):
            print(chunk.text, end="")

`generate` and `chat` stream; `generate_text` and `chat_text` wait for the whole answer. `AsyncClient` is the same with `async`.
Everything raises the errors of `twopass.errors`. Closing a stream, or dropping it, cancels the request.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from twopass.errors import ClientClosed, InvalidRequest, RequestError, ServerError, from_status
from twopass.proto import twopass_pb2 as pb
from twopass.proto.twopass_pb2_grpc import TwopassStub

FinishReason = Literal["stop", "length"]
M = TypeVar("M", bound=Message)

_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_REQUEST_FIELDS = ("priority", "cache_salt", "request_id")
"""Options that are no sampling parameters."""
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the server says what is too large
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating call; names and meaning follow vLLM. Absent: the server's default."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    n: int
    priority: int
    """Lower is served first."""
    cache_salt: str
    request_id: str
    timeout_s: float
    """The request's deadline; instead of the client's own."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, taken from a prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the server, from the arrival of the call; `stages` add up to `total_s`."""

    ttft_s: float
    total_s: float
    stages: Mapping[str, float]
    attempts: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. `text` may lag behind `token_ids`: a piece never ends inside a character or a possible stop string."""

    text: str
    token_ids: list[int]
    prompt_tokens: int | None = None
    """First chunk only, like `request_id`."""
    request_id: str | None = None
    finish_reason: FinishReason | None = None
    """Last chunk only, like `usage` and `timing`."""
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


class Client:
    """One connection, for any number of threads. `timeout_s`: deadline of each call that names none; None: no deadline."""

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = TwopassStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._timeout_s = timeout_s

    def generate(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> "Stream":
        """Streams the continuation of a text or of token ids. The request starts at once, not with the first iteration."""
        return self._start(_generate_request(prompt, prompt_token_ids, None, options), options)

    def chat(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> "Stream":
        """Streams the assistant's answer to messages of `role` and `content`."""
        return self._start(_generate_request(None, None, messages, options), options)

    def generate_text(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As `generate`, but waits for the whole answer."""
        return self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read()

    def chat_text(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> Completion:
        """As `chat`, but waits for the whole answer."""
        return self.chat(messages, **options).read()

    def tokenize(self, text: str | None = None, *, messages: Iterable[Mapping[str, str]] | None = None) -> list[int]:
        """The token ids that the server would use for this prompt."""
        return list(self._call(self._stub.Tokenize, _tokenize_request(text, messages)).token_ids)

    def model_info(self) -> ModelInfo:
        """What is served."""
        return _model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def close(self) -> None:
        """Cancels what is open and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> "Stream":
        try:
            return Stream(self._stub.Generate(request, timeout=options.get("timeout_s", self._timeout_s)))
        except ValueError as error:  # what grpc raises on a closed channel
            raise ClientClosed(str(error)) from error

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _from_call(error) from error
        except ValueError as error:
            raise ClientClosed(str(error)) from error


class Stream(Iterator[Chunk]):
    """One answer on its way: iterate it, `read` the rest, or `close` it to cancel the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ended = False

    def __next__(self) -> Chunk:
        try:
            message = next(self._call)
        except StopIteration:
            if not self._ended:
                raise _incomplete() from None
            raise
        except grpc.RpcError as error:
            raise _from_call(self._call) from error
        chunk = _chunk(message)
        self._ended = chunk.finish_reason is not None
        return chunk

    def read(self) -> Completion:
        """Waits for the end and joins all chunks not yet iterated."""
        with self:
            return _join(list(self))

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncClient:
    """As `Client`, for one event loop."""

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = TwopassStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._timeout_s = timeout_s

    def generate(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncStream":
        """Streams the continuation of a text or of token ids. The request starts at once, not with the first iteration."""
        return self._start(_generate_request(prompt, prompt_token_ids, None, options), options)

    def chat(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> "AsyncStream":
        """Streams the assistant's answer to messages of `role` and `content`."""
        return self._start(_generate_request(None, None, messages, options), options)

    async def generate_text(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As `generate`, but waits for the whole answer."""
        return await self.generate(prompt, prompt_token_ids=prompt_token_ids, **options).read()

    async def chat_text(self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]) -> Completion:
        """As `chat`, but waits for the whole answer."""
        return await self.chat(messages, **options).read()

    async def tokenize(self, text: str | None = None, *, messages: Iterable[Mapping[str, str]] | None = None) -> list[int]:
        """The token ids that the server would use for this prompt."""
        return list((await self._call(self._stub.Tokenize, _tokenize_request(text, messages))).token_ids)

    async def model_info(self) -> ModelInfo:
        """What is served."""
        return _model_info(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def close(self) -> None:
        """Cancels what is open and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> "AsyncStream":
        try:
            return AsyncStream(self._stub.Generate(request, timeout=options.get("timeout_s", self._timeout_s)))
        except grpc.aio.UsageError as error:
            raise ClientClosed(str(error)) from error

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _from_call(error) from error
        except grpc.aio.UsageError as error:
            raise ClientClosed(str(error)) from error


class AsyncStream(AsyncIterator[Chunk]):
    """As `Stream`; `aclose` cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ended = False

    async def __anext__(self) -> Chunk:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise _from_call(error) from error
        if message is grpc.aio.EOF:
            if not self._ended:
                raise _incomplete()
            raise StopAsyncIteration
        chunk = _chunk(message)
        self._ended = chunk.finish_reason is not None
        return chunk

    async def read(self) -> Completion:
        """Waits for the end and joins all chunks not yet iterated."""
        async with self:
            return _join([chunk async for chunk in self])

    async def aclose(self) -> None:
        """Cancels the request unless it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()


def _generate_request(
    prompt: str | None,
    prompt_token_ids: Iterable[int] | None,
    messages: Iterable[Mapping[str, str]] | None,
    options: GenerateOptions,
) -> pb.GenerateRequest:
    if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
        raise InvalidRequest("prompt: exactly one of prompt and prompt_token_ids must be given", field="prompt")
    given = {name: value for name, value in options.items() if name != "timeout_s" and value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    fields: dict[str, Any] = {name: given.pop(name) for name in _REQUEST_FIELDS if name in given}
    fields["sampling"] = _build(pb.SamplingParams, given)
    if prompt is not None:
        fields["text"] = prompt
    elif prompt_token_ids is not None:
        fields["token_ids"] = _build(pb.TokenIds, {"ids": prompt_token_ids})
    else:
        fields["chat"] = _build(pb.Chat, {"messages": messages})
    return _build(pb.GenerateRequest, fields)


def _tokenize_request(text: str | None, messages: Iterable[Mapping[str, str]] | None) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise InvalidRequest("prompt: exactly one of text and messages must be given", field="prompt")
    return _build(pb.TokenizeRequest, {"text": text} if messages is None else {"chat": _build(pb.Chat, {"messages": messages})})


def _build(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Field by field, so that a wrong type, an unknown name or a number out of range is refused by name."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: {repr(value)[:64]} is not allowed: {error}", field=name) from error
    return message


def _chunk(message: pb.GenerateResponse) -> Chunk:
    chunk_ids = list(message.token_ids)
    prompt_tokens = message.prompt_tokens if message.HasField("prompt_tokens") else None
    request_id = message.request_id if message.HasField("request_id") else None
    if not message.HasField("finish_reason"):
        return Chunk(message.text, chunk_ids, prompt_tokens, request_id)
    finish_reason = _FINISH_REASONS.get(message.finish_reason)
    if finish_reason is None:
        raise ServerError(f"finish_reason {message.finish_reason} is not known to this client", status="OK")
    usage, timing = message.usage, message.timing
    return Chunk(
        text=message.text,
        token_ids=chunk_ids,
        prompt_tokens=prompt_tokens,
        request_id=request_id,
        finish_reason=finish_reason,
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        timing=Timing(timing.ttft_s, timing.total_s, dict(timing.stages), timing.attempts),
    )


def _join(chunks: list[Chunk]) -> Completion:
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None or last.usage is None or last.timing is None:
        raise _incomplete()
    return Completion(
        request_id=chunks[0].request_id or "",
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        finish_reason=last.finish_reason,
        usage=last.usage,
        timing=last.timing,
    )


def _model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(message.model, message.max_model_len, message.vocab_size, message.has_chat_template)


def _incomplete() -> ServerError:
    return ServerError("the stream ended before the answer was complete", status="OK")


def _from_call(call: Any) -> RequestError:
    """`call`: an ended call or the error it raised; both know status, details and trailing metadata."""
    metadata = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
    return from_status(call.code().name, call.details() or "", metadata)
