"""The HTTP door: OpenAI's dialect, as its clients and curl speak it.

1. A request's body is read up to `max_message_bytes`, then parsed in a thread.
2. The front door carries each of its prompts through the core. Until the first piece is there, an error is an HTTP
   status; after it, an event of the stream.
3. A client that goes away cancels its request. One that takes nothing for `write_timeout_s` is cut off by the kernel.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.errors import InvalidRequest, NotFound, RequestError
from router.call import Piece
from router.call_request import CallRequest, Prompt
from router.config import RouterConfig
from router.frontdoor import FrontDoor
from router.http_endpoint import Endpoint, Posted, body_of, error_body
from router.merge import merged
from router.openai.bodies import MAX_SHOWN, ChatBody, CompletionBody, DetokenizeBody, ModelBody, TokenizeBody, read_body
from router.openai.decode import (
    CHAT_FIELDS,
    FIELDS,
    Asked,
    decode_chat,
    decode_completion,
    decode_tokenize,
    renamed,
)
from router.openai.encode import DONE, ChatWriter, CompletionWriter, Dialect, error_event, total
from router.openai.schema import document
from router.request import Usage
from router.tokenizer import Tokenizer, join_bytes
from router.version import version

OPEN_PATHS = frozenset(("/health", "/ready", "/version"))
"""Those that need no token: load balancers ask for them."""
IGNORED_HEADER = "x-twopass-ignored"
"""Names the fields of a request that nobody knows."""

Pieces = AsyncGenerator[tuple[int, Piece], None]
M = TypeVar("M", bound=ModelBody)


class _Form(NamedTuple):
    """What a request asks for, and how its answers are written. `names`: its client's names of fields."""

    asked: Asked
    writer: Dialect
    ignored: list[str]
    names: dict[str, str]


class HttpDoor:
    """What the door does, as an ASGI application for `HttpServer`. `collector`: what GET /metrics shows; without one
    there is no such path.
    """

    def __init__(self, door: FrontDoor, config: RouterConfig, collector: Collector | None) -> None:
        self._door, self._config, self._collector = door, config, collector
        self._created = int(time.time())

    def app(self) -> Starlette:
        posts = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._one_model,
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
            "/openapi.json": self._openapi,
        }
        if self._collector is not None:
            gets["/metrics"] = self._metrics
        limit = self._config.max_message_bytes
        return Starlette(
            routes=[
                *(Route(path, Endpoint(answer, limit), methods=["POST"]) for path, answer in posts.items()),
                *(Route(path, answer) for path, answer in gets.items()),
            ],
            exception_handlers={HTTPException: _refused},
        )

    # ---- generating

    async def _completions(self, posted: Posted) -> None:
        def read() -> _Form:
            body, ignored = self._read(CompletionBody, posted)
            asked = decode_completion(body, _request_id(posted), self._door.tokenizer)
            return _Form(asked, CompletionWriter(asked, *self._named()), ignored, FIELDS)

        await self._answer(posted, await self._door.in_thread(read))

    async def _chat(self, posted: Posted) -> None:
        def read() -> _Form:
            body, ignored = self._read(ChatBody, posted)
            asked = decode_chat(body, _request_id(posted))
            return _Form(asked, ChatWriter(asked, *self._named()), ignored, CHAT_FIELDS)

        await self._answer(posted, await self._door.in_thread(read))

    async def _answer(self, posted: Posted, form: _Form) -> None:
        asked, headers = form.asked, {"x-request-id": form.asked.request_id}
        if form.ignored:
            names = ", ".join(form.ignored)[:1024]
            headers[IGNORED_HEADER] = names.encode("unicode_escape").decode()  # a header has no line breaks
        traceparent = posted.headers.get("traceparent", "")
        calls = [
            self._door.generate(partial(_same, call), deadline_s=None, traceparent=traceparent, account=posted.account)
            for call in asked.calls
        ]
        try:
            async with aclosing(merged(calls)) as pieces:
                if asked.stream:
                    await _stream(posted, form, pieces, headers)
                else:
                    await posted.whole(200, await _whole(form, pieces), headers)
        except InvalidRequest as error:
            raise renamed(error, form.names) from None

    def _named(self) -> tuple[str, int, Tokenizer]:
        return self._door.model.name, int(time.time()), self._door.tokenizer

    # ---- the rest

    async def _tokenize(self, posted: Posted) -> None:
        def read() -> Prompt:
            return decode_tokenize(self._read(TokenizeBody, posted)[0])

        try:
            token_ids = await self._door.tokenize(read)
        except InvalidRequest as error:
            raise renamed(error, FIELDS | CHAT_FIELDS) from None
        answer = {
            "tokens": token_ids.tolist(),
            "count": len(token_ids),
            "max_model_len": self._door.facts.max_model_len,
        }
        await posted.whole(200, json.dumps(answer).encode())

    async def _detokenize(self, posted: Posted) -> None:
        def text() -> str:
            body, _ = self._read(DetokenizeBody, posted)
            vocab_size = self._door.model.vocab_size
            for i, token_id in enumerate(body.tokens):
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(f"tokens[{i}]", token_id, f"token ids are 0 to {vocab_size - 1}")
            return join_bytes(self._door.tokenizer.token_bytes, body.tokens).decode("utf-8", "replace")

        await posted.whole(200, json.dumps({"prompt": await self._door.in_thread(text)}).encode())

    def _read(self, kind: type[M], posted: Posted) -> tuple[M, list[str]]:
        body, ignored = read_body(kind, posted.body)
        if body.model is not None and body.model != self._door.model.name:
            raise NotFound("model", body.model[:MAX_SHOWN], f"this server has {self._door.model.name}")
        return body, ignored

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._door.model.name:
            raise HTTPException(404, f"model: {name[:MAX_SHOWN]} is not served, {self._door.model.name} is")
        return JSONResponse(self._described())

    def _described(self) -> dict[str, object]:
        return {
            "id": self._door.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "twopass",
            "max_model_len": self._door.facts.max_model_len,
        }

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _ready(self, request: Request) -> Response:
        ready = self._door.facts.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version()})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(document(version()))

    async def _metrics(self, request: Request) -> Response:
        assert self._collector is not None
        return Response(generate_latest(self._collector), media_type=CONTENT_TYPE_LATEST)


async def _stream(posted: Posted, form: _Form, pieces: Pieces, headers: dict[str, str]) -> None:
    """Events, from the first piece on. An error before it is raised; after it, it is an event."""
    asked, writer, opened, usages = form.asked, form.writer, set[int](), list[Usage]()
    try:
        async for call, piece in pieces:
            choice, data = call * asked.n + piece.index, b""
            if not posted.begun:
                await posted.begin(headers)
            if choice not in opened:
                opened.add(choice)
                data = writer.opening(choice)
            if data := data + writer.event(choice, piece):
                await posted.send(data)
            if piece.usage is not None:
                usages.append(piece.usage)
    except RequestError as error:
        if not posted.begun:
            raise
        await posted.end(error_event(body_of(error)) + DONE)
        return
    await posted.end((writer.usage_event(total(usages)) if asked.include_usage else b"") + DONE)


async def _whole(form: _Form, pieces: Pieces) -> bytes:
    asked, usages = form.asked, list[Usage]()
    choices: list[list[Piece]] = [[] for _ in range(len(asked.calls) * asked.n)]
    async for call, piece in pieces:
        choices[call * asked.n + piece.index].append(piece)
        if piece.usage is not None:
            usages.append(piece.usage)
    return form.writer.whole(choices, total(usages))


async def _refused(request: Request, error: Exception) -> Response:
    """A path or a method that this door does not have."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error_body(error.detail, "invalid_request_error")}, error.status_code, error.headers)


def _same(call: CallRequest) -> CallRequest:
    return call


def _request_id(posted: Posted) -> str:
    return posted.headers.get("x-request-id") or uuid.uuid4().hex
