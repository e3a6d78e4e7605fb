"""One POST of the HTTP door, from its first byte to the last of its answer. No dialect is known here but its errors.

While the answer is made, a second task waits for the client to leave. It cancels the handler, which cancels its calls.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import InvalidRequest, NotFound, RequestError
from router.accounts import Accounts
from router.admission import Account
from router.error_table import retry_after_s, row_of

ACCOUNT = "twopass.account"
"""Where a `Guard` leaves in the scope whose request it is."""


class Guard:
    """Lets requests with a token through to `app`, and those for `open_paths` without one."""

    def __init__(self, app: ASGIApp, accounts: Accounts, open_paths: frozenset[str] = frozenset()) -> None:
        self._app, self._accounts, self._open_paths = app, accounts, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                scope[ACCOUNT] = self._accounts.authenticate(Headers(scope=scope).get("authorization"))
            except RequestError as error:
                headers = {"www-authenticate": "Bearer"}
                await send_error(Posted(scope, b"", send), row_of(error).http_status, body_of(error), headers)
                return
        await self._app(scope, receive, send)


class TooLarge(Exception):
    """The body exceeds the limit."""


class Posted:
    """A request whose body is here, and the way to its answer: once `whole`, or `begin` and then `send` until `end`."""

    def __init__(self, scope: Scope, body: bytes, send: Send) -> None:
        self.body, self.headers = body, Headers(scope=scope)
        self.account: Account | None = scope.get(ACCOUNT)
        self._send = send
        self.begun = False

    async def whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        await self._begin(
            status, {"content-length": str(len(body)), "content-type": "application/json", **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, headers: dict[str, str]) -> None:
        """Begins a stream of events."""
        await self._begin(
            200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        )

    async def send(self, data: bytes) -> None:
        """Returns once the connection has taken it."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.begun = True
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class Endpoint:
    """An ASGI application around `answer`, which may raise RequestError before it has begun to answer."""

    def __init__(self, answer: Callable[[Posted], Awaitable[None]], max_message_bytes: int) -> None:
        self._answer, self._max_message_bytes = answer, max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(receive)
        except TooLarge:
            limit = f"message: the body is too large: at most {self._max_message_bytes} bytes (max_message_bytes)"
            await send_error(Posted(scope, b"", send), 413, error_body(limit, "invalid_request_error"))
            return
        if body is None:
            return  # the client left
        posted, task = Posted(scope, body, send), asyncio.current_task()
        assert task is not None
        leaving = asyncio.create_task(_left(receive, task))
        try:
            await self._answer(posted)
        except RequestError as error:
            headers = {} if (hint_s := retry_after_s(error)) is None else {"retry-after": str(math.ceil(hint_s))}
            await send_error(posted, row_of(error).http_status, body_of(error), headers)
        except asyncio.CancelledError:
            if not leaving.done():
                raise
            task.uncancel()
        finally:
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body, or None if the client leaves before it has sent that."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_message_bytes:
                raise TooLarge
            if not message.get("more_body", False):
                return b"".join(parts)


async def _left(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    return {"message": message, "type": kind, "param": param, "code": code}


def body_of(error: RequestError) -> dict[str, Any]:
    param = error.field if isinstance(error, InvalidRequest | NotFound) else None
    code = f"{param}_not_found" if isinstance(error, NotFound) else None
    return error_body(str(error), row_of(error).kind, param=param, code=code)


async def send_error(posted: Posted, status: int, error: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    await posted.whole(status, json.dumps({"error": error}).encode(), headers)
