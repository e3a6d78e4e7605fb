"""Thousands of bad requests to the HTTP door: each ends with a status and a reason, none is the server's fault, and
nothing stays open.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from router.config import RouterConfig
from router.http_door import HttpDoor
from router.openai.schema import POSTS
from tests.hang import HANG_S
from tests.router.http.serving import http_scenario, http_serving
from tests.router.http.test_http_door import CHAT
from tests.router.scripted_core import ScriptedCore, Serving, echo


class Running(NamedTuple):
    address: str
    num_open: Callable[[], int]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A door that serves in a thread of its own."""
    up, loop = threading.Event(), asyncio.new_event_loop()
    served: list[Serving] = []

    async def serve() -> None:
        async with http_serving(ScriptedCore(echo)) as one:
            served.append(one)
            up.set()
            await done.wait()

    done = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(HANG_S)
        yield Running(served[0].address, lambda: served[0].door.num_open)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(HANG_S)
        loop.close()


@pytest.fixture(scope="module")
def api(running: Running) -> Any:
    return schemathesis.openapi.from_url(f"{running.address}/openapi.json")


load_all_checks()
checks = CHECKS.get_by_names(["not_a_server_error", "status_code_conformance", "content_type_conformance"])


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", POSTS)
def test_what_the_description_allows_and_what_it_does_not(
    running: Running, api: Any, path: str, mode: GenerationMode
) -> None:
    cases = api[path]["POST"].as_strategy(generation_mode=mode)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=HANG_S)

    ask()
    assert running.num_open() == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    *("prompt", "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop"),
    *("stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "echo", "stream", "stream_options", "priority"),
    *("cache_salt", "request_id", "min_tokens", "presence_penalty", "tools", "tokens", "repetition_penalty"),
)
bodies = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4)
json_bodies = st.tuples(st.booleans(), bodies) | st.binary(max_size=40)


@settings(max_examples=50)
@given(st.lists(json_bodies, min_size=25, max_size=25))
def test_no_body_is_the_servers_fault(some: list[tuple[bool, dict[str, Any]] | bytes]) -> None:
    """Every answer is one, or a refusal with a reason, and nothing stays open. Without sockets: 5,000 bodies."""

    async def test(s: Serving, _: httpx.AsyncClient) -> None:
        app = httpx.ASGITransport(HttpDoor(s.door, RouterConfig(), None).app())
        async with httpx.AsyncClient(transport=app, base_url="http://door") as client:
            for body in some:
                if isinstance(body, bytes):
                    data = body
                else:
                    usual, fields = body
                    data = json.dumps({**({"prompt": "<1>", **CHAT} if usual else {}), **fields}).encode()
                for path in POSTS:
                    answer = await client.post(path, content=data)
                    assert answer.status_code in (200, 400, 404), (path, data, answer.text)
                    assert answer.status_code == 200 or answer.json()["error"]["message"]
        assert s.door.num_open == 0

    http_scenario(test, ScriptedCore(echo))
