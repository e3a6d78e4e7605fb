"""Spans of calls through the gRPC door, kept in memory or sent over HTTP to a collector in this process."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protocol.clock import VirtualClock
from protocol.errors import ConfigError, RequestFailed
from protocol.messages import Address, EngineRequest, Envelope, Hello, SamplingParams
from router.actor import RouterActor
from router.admission import ClientRequest
from router.config import RouterConfig
from router.request import Ended, Usage
from router.router import Router
from router.tracing import SpanTracing, Untraced, export_to, valid_traceparent
from tests.hang import HANG_S
from tests.router.scripted_core import ScriptedCore, Serving, scenario
from twopass import AsyncClient, InvalidRequest, Unavailable

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
STAGES = {
    "router_queue": 0.5,
    "prefill_queue": 0.25,
    "prefill": 1.0,
    "transfer": 0.125,
    "first_step": 0.25,
    "decode": 2.0,
    "messages": 0.5,
}


class Recorded:
    """A tracing that keeps its spans in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = SpanTracing(provider)

    @property
    def codes(self) -> list[object]:
        """The statuses of all calls, in the order in which they ended."""
        spans = self._exporter.get_finished_spans()
        return [
            span.attributes["rpc.response.status_code"] for span in spans if span.attributes and span.name == "generate"
        ]

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


def answering(core: ScriptedCore, request: ClientRequest) -> None:
    core.tokens(request.request_id, 7)
    core.events.append(Ended(request.request_id, "length", None, Usage(2, 0, 1), STAGES, 1, "disaggregated"))


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_call_has_a_span_for_each_part_under_the_callers_own() -> None:
    recorded = Recorded()

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            asked: dict[str, Any] = {"prompt_token_ids": [1, 2], "max_tokens": 1, "temperature": 0.5, "seed": 3}
            await client.generate_text(traceparent=TRACEPARENT, request_id="mine", **asked)
            request = await s.next_submit()
        call = recorded.spans["generate"]
        assert request.traceparent == f"00-{TRACE}-{call.context.span_id:016x}-01"

    scenario(test, ScriptedCore(answering), tracing=recorded.tracing)
    spans = recorded.spans
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    call = spans.pop("generate")
    assert call.parent is not None and f"{call.parent.span_id:016x}" == CALLER
    assert all(span.parent is not None and span.parent.span_id == call.context.span_id for span in spans.values())
    assert {name: seconds(span) for name, span in spans.items()} == {
        "queue": 0.75,
        "prefill": 1.0,
        "transfer": 0.125,
        "decode": 2.25,
    }
    starts, ends = [span.start_time for span in spans.values()], [span.end_time for span in spans.values()]
    assert starts[1:] == ends[:-1], "the parts follow one another"
    assert call.attributes is not None and call.attributes["rpc.response.status_code"] == "OK"
    assert call.attributes["twopass.0.messages_s"] == 0.5
    expected: dict[str, object] = {
        "operation.name": "text_completion",
        "provider.name": "twopass",
        "request.model": "arithmetic",
        "request.max_tokens": 1,
        "request.temperature": 0.5,
        "request.seed": 3,
        "request.choice.count": 1,
        "response.id": "mine",
        "response.model": "arithmetic",
        "response.finish_reasons": ("length",),
        "usage.input_tokens": 2,
        "usage.output_tokens": 1,
        "usage.cache_read.input_tokens": 0,
    }
    for name, value in expected.items():
        assert call.attributes[f"gen_ai.{name}"] == value, name
    assert "gen_ai.request.top_k" not in call.attributes, "what nobody asked for is left out"


def test_failed_refused_and_cancelled_calls_end_with_their_status() -> None:
    codes: list[object] = []
    for error, failure in ((None, None), (RequestFailed("3 attempts"), Unavailable)):
        recorded = Recorded()

        def on_submit(core: ScriptedCore, request: ClientRequest, error: RequestFailed | None = error) -> None:
            core.tokens(request.request_id, 7)
            if error is not None:
                core.end(request.request_id, None, error)

        async def test(s: Serving, failure: type[Exception] | None = failure) -> None:
            async with AsyncClient(s.address, max_tries=1) as client:
                stream = client.generate(prompt_token_ids=[1])
                await anext(stream)
                if failure is not None:
                    with pytest.raises(failure):
                        await anext(stream)
                    return
                await stream.aclose()
                while not s.core.cancelled:
                    await s.core.calls.get()
                with pytest.raises(InvalidRequest):
                    await client.generate_text(prompt_token_ids=[])

        scenario(test, ScriptedCore(on_submit), tracing=recorded.tracing)
        codes += recorded.codes
    assert codes == ["CANCELLED", "INVALID_ARGUMENT", "UNAVAILABLE"]


def test_a_caller_that_is_not_sampled_is_not_recorded_but_its_context_travels() -> None:
    recorded = Recorded()
    trace = recorded.tracing.begin(f"00-{TRACE}-{CALLER}-00")
    trace.end("OK")
    assert recorded.spans == {}
    assert trace.traceparent.startswith(f"00-{TRACE}-") and trace.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        TRACEPARENT.upper(),
    ],
)
def test_a_context_that_is_none_begins_a_new_trace(text: str) -> None:
    assert valid_traceparent(text) == Untraced().begin(text).traceparent == ""
    recorded = Recorded()
    recorded.tracing.begin(text).end("OK")
    assert recorded.spans["generate"].parent is None


def test_without_an_endpoint_the_callers_context_reaches_both_engines() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            await client.generate_text(prompt_token_ids=[1, 2], traceparent=TRACEPARENT)
        assert (await s.next_submit()).traceparent == TRACEPARENT

    scenario(test, ScriptedCore(answering))


def test_the_router_hands_the_context_to_both_engines() -> None:
    router = Router(RouterConfig(), address=Address("router", 1), clock=VirtualClock(), seed=1)
    fields = {
        "layout_fingerprint": b"",
        "block_size": 16,
        "num_blocks": 99,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "endpoint": b"",
    }
    fields["max_prompt_tokens"] = 511
    for epoch, role in enumerate(("prefill", "decode"), 2):
        address = Address(f"{role}-0", epoch)
        router.replica_started(address)
        router.handle(Envelope(address, router.address, 0, Hello(role=role, **fields)))  # type: ignore[arg-type]
    prompt = np.arange(40, dtype=np.int32)
    request = ClientRequest(
        request_id="a", prompt_token_ids=prompt, max_tokens=4, sampling=SamplingParams(), traceparent=TRACEPARENT
    )
    router.submit(request)
    sent = [message for _, message in router.outbox if isinstance(message, EngineRequest)]
    told = [(message.role, message.traceparent) for message in sent]
    assert told == [("decode", TRACEPARENT), ("prefill", TRACEPARENT)]


@contextmanager
def collector() -> Iterator[tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]]:
    """Yields the URL of an OTLP/HTTP collector on loopback, and a queue of what it receives."""
    received: SimpleQueue[ExportTraceServiceRequest] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()
        thread.join()


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    with collector() as (endpoint, received):
        tracing = export_to(endpoint)
        trace = tracing.begin(TRACEPARENT)
        trace.answered(0, Ended("a", "length", None, Usage(2, 0, 1), STAGES, 1, "disaggregated"), "length", 0.0)
        trace.end("OK")
        tracing.close()
        (resource,) = received.get(timeout=HANG_S).resource_spans
    assert {(a.key, a.value.string_value) for a in resource.resource.attributes} >= {("service.name", "twopass")}
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"queue", "prefill", "transfer", "decode", "generate"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ConfigError, match=r"router\.otlp_endpoint: http://x needs packages that are missing .*twopass\[tracing\]"
    ):
        export_to("http://x")


def test_the_router_process_exports_what_it_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.actor.configure", lambda level, address: None)  # pytest owns this process's logs

    async def serve_one(endpoint: str) -> None:
        config = RouterConfig(grpc_port=0, metrics_port=0, otlp_endpoint=endpoint)
        actor = RouterActor(Address("router", 1), "info", config, None, 100, "", lambda envelope: None)
        async with AsyncClient(f"127.0.0.1:{(await actor.start()).grpc_port}", max_tries=1) as client:
            with pytest.raises(Unavailable):
                await client.generate_text(prompt_token_ids=[1], traceparent=TRACEPARENT)
        await actor.stop()

    with collector() as (endpoint, received):
        asyncio.run(serve_one(endpoint))
        (span,) = received.get(timeout=HANG_S).resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("generate", TRACE, CALLER)
    assert {a.key: a.value.string_value for a in span.attributes} == {"rpc.response.status_code": "UNAVAILABLE"}


def test_nothing_is_imported_without_an_endpoint() -> None:
    code = "import sys, router.actor; print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
