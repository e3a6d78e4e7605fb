"""What the router logs about replicas and about attempts that fail."""

import logging
from typing import Any

import numpy as np
import pytest

from protocol.clock import VirtualClock
from protocol.messages import Address, Envelope, Hello, SamplingParams
from router.admission import ClientRequest
from router.config import RouterConfig
from router.router import Router

D = Address("decode-0", 2)


def served() -> Router:
    router = Router(RouterConfig(max_attempts=1), address=Address("router", 1), clock=VirtualClock(), seed=1)
    router.replica_started(D)
    hello = Hello(
        role="decode",
        layout_fingerprint=b"",
        block_size=16,
        num_blocks=99,
        max_num_seqs=8,
        max_model_len=512,
        max_prompt_tokens=511,
        endpoint=b"",
    )
    router.handle(Envelope(D, router.address, 0, hello))
    request = ClientRequest(
        request_id="a", prompt_token_ids=np.arange(3, dtype=np.int32), max_tokens=4, sampling=SamplingParams()
    )
    router.submit(request)
    return router


def said(caplog: pytest.LogCaptureFixture, *fields: str) -> list[tuple[Any, ...]]:
    return [
        (record.levelname, record.message, *(getattr(record, field, None) for field in fields))
        for record in caplog.records
    ]


def test_a_death_is_told_with_the_attempts_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served().replica_down(D)
    assert said(caplog, "request_id", "attempt", "error") == [
        ("INFO", "replica up", None, None, None),
        ("INFO", "replica down", None, None, None),
        ("WARNING", "attempt failed", "a", 1, "decode replica decode-0 is down"),
    ]
    assert [getattr(record, "peer", None) for record in caplog.records] == ["decode-0@2", "decode-0@2", None]


def test_every_request_is_followed_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served().cancel("a")
    messages = [("request accepted", "a", None), ("attempt started", "a", 1), ("request ended", "a", 1)]
    assert [row[1:] for row in said(caplog, "request_id", "attempt") if row[0] == "DEBUG"] == messages
    assert caplog.records[-1].error == "cancelled by the client"  # type: ignore[attr-defined]
