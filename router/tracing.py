"""OpenTelemetry spans of calls, made from the durations that router and engines report.

    generate                            a call from arrival to end; child of the caller's span (W3C `traceparent`)
    ├── queue                           the four parts of each answer follow one another, as `STAGES` says
    ├── prefill
    ├── transfer
    └── decode

The durations are exact. Times that belong to no part (`messages`, `deliver`) have no span, so a child may begin earlier
than its work did. `generate` has every stage as an attribute, and what was asked for and used under the names that
OpenTelemetry's conventions for generative AI give them (`gen_ai.*`).

There are no spans unless `router.otlp_endpoint` is set. Only then are the packages needed that
`pip install 'twopass[tracing]'` installs.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from protocol.errors import ConfigError
from router.admission import ClientRequest
from router.request import Ended
from twopass.proxy import is_loopback

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

STAGES = {
    "queue": ("router_queue", "prefill_queue"),
    "prefill": ("prefill",),
    "transfer": ("reserve_wait", "transfer", "decode_queue"),
    "decode": ("first_step", "decode"),
}
"""The spans in their order, with the stages of a request that each one covers. A span without a stage is left out."""
EXPORT_TIMEOUT_S = 2.0
"""How long one export to the endpoint may take."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(text: str) -> str:
    """Returns `text`, or "" if it is no valid W3C traceparent. Then a new trace begins."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class CallTrace(Protocol):
    """The trace of one call. `traceparent` is what the engines are told."""

    traceparent: str

    def asked(self, model: str, call_id: str, requests: Sequence[ClientRequest]) -> None:
        """Records that the call is accepted. There is one request for each answer; they differ in id and seed only."""

    def answered(self, index: int, ended: Ended, told: str, tokenize_s: float) -> None:
        """Records that an answer has ended. `told`: how it ended for its client. `tokenize_s`: seconds from the call's
        arrival to its submission.
        """

    def end(self, code: str) -> None:
        """Records that the call is over. `code`: the name of its gRPC status."""


class Tracing(Protocol):
    """Makes a trace for each call."""

    def begin(self, traceparent: str) -> CallTrace:
        """Begins the trace of a call that arrives now. `traceparent`: as the caller sent it, or ""."""

    def close(self) -> None:
        """Exports the remaining spans. It blocks until the endpoint has taken them, or has not in time."""


class Untraced:
    """Passes the caller's context on to the engines and records nothing."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def begin(self, traceparent: str) -> CallTrace:
        return Untraced(valid_traceparent(traceparent))

    def asked(self, model: str, call_id: str, requests: Sequence[ClientRequest]) -> None:
        pass

    def answered(self, index: int, ended: Ended, told: str, tokenize_s: float) -> None:
        pass

    def end(self, code: str) -> None:
        pass

    def close(self) -> None:
        pass


class SpanTracing:
    """Records every call whose caller does not forbid it (flag `sampled` of its traceparent). `wall_ns` returns
    nanoseconds since 1970.
    """

    def __init__(self, provider: "TracerProvider", wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._provider, self._wall_ns = provider, wall_ns
        self._tracer = provider.get_tracer("twopass")

    def begin(self, traceparent: str) -> CallTrace:
        return _CallSpans(self._tracer, valid_traceparent(traceparent), self._wall_ns)

    def close(self) -> None:
        self._provider.shutdown()


class _CallSpans:
    """The spans of one call."""

    def __init__(self, tracer: "Tracer", traceparent: str, wall_ns: Callable[[], int]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        w3c = TraceContextTextMapPropagator()
        self._tracer, self._wall_ns, self._arrived_ns = tracer, wall_ns, wall_ns()
        parent = w3c.extract({"traceparent": traceparent})
        self._span: Span = tracer.start_span("generate", parent, SpanKind.SERVER, start_time=self._arrived_ns)
        self._context = set_span_in_context(self._span)
        carrier: dict[str, str] = {}
        w3c.inject(carrier, self._context)
        self.traceparent = carrier["traceparent"]
        self._told: list[str] = []
        """How each answer that has ended so far ended."""
        self._num_output_tokens = 0

    def asked(self, model: str, call_id: str, requests: Sequence[ClientRequest]) -> None:
        self._span.set_attributes(_request_attributes(model, requests[0], len(requests)))
        self._span.set_attribute("gen_ai.response.id", call_id)

    def answered(self, index: int, ended: Ended, told: str, tokenize_s: float) -> None:
        self._span.set_attributes({f"twopass.{index}.{stage}_s": seconds for stage, seconds in ended.stages.items()})
        self._span.set_attributes({f"twopass.{index}.attempts": ended.attempts, f"twopass.{index}.ended": told})
        self._told.append(told)
        self._num_output_tokens += ended.usage.completion_tokens
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": self._told,
                "gen_ai.usage.output_tokens": self._num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.usage.cached_tokens,
            }
        )
        at_ns = self._arrived_ns + _ns(tokenize_s + ended.stages.get("lost_attempts", 0.0))
        for name, stages in STAGES.items():
            found = [ended.stages[stage] for stage in stages if stage in ended.stages]
            if found:
                span = self._tracer.start_span(
                    name, self._context, start_time=at_ns, attributes={"twopass.answer": index}
                )
                at_ns += _ns(sum(found))
                span.end(at_ns)

    def end(self, code: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            self._span.set_status(StatusCode.ERROR, code)
        self._span.end(self._wall_ns())


def _request_attributes(model: str, request: ClientRequest, num_answers: int) -> dict[str, str | int | float]:
    """Names a request's parameters as OpenTelemetry's conventions for generative AI do. Unset ones are left out."""
    sampling = request.sampling
    asked: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "twopass",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": num_answers,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def export_to(endpoint: str) -> SpanTracing:
    """Returns a tracing that sends spans to a collector over OTLP/HTTP, in the background. If the collector cannot be
    reached, the spans are lost. Raises ConfigError if packages are missing.
    """
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        needed = f"{endpoint} needs packages that are missing ({error}): pip install 'twopass[tracing]'"
        raise ConfigError(f"router.otlp_endpoint: {needed}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "twopass"}))
    session = requests.Session()
    session.trust_env = not is_loopback(urlsplit(endpoint).hostname or "")  # no proxy leads to this machine
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S, session=session)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanTracing(provider)
