"""uvicorn's protocol of one connection, with a bound on how slowly a request may come."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http_endpoint import error_body


class TimedProtocol(HttpToolsProtocol):
    """A connection without a whole request for `read_timeout_s` is closed: one that has begun gets a 408 first. Between
    two requests uvicorn's own `timeout_keep_alive` holds.
    """

    def __init__(self, *args: Any, read_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._reading: asyncio.TimerHandle | None = None
        """Runs until the request that is being read is whole."""
        self._begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        self._expect_request()

    def on_message_complete(self) -> None:
        self._stop_expecting()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._read_timeout_s, self._give_up)

    def _stop_expecting(self) -> None:
        self._begun = False
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up(self) -> None:
        cycle = self.cycle
        answers = cycle is not None and cycle.response_started and not cycle.response_complete
        if self._begun and not answers:
            text = f"the request took longer than {self._read_timeout_s:g} s to come (read_timeout_s)"
            body = json.dumps({"error": error_body(text, "invalid_request_error")}).encode()
            head = (
                "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
