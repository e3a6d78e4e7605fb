"""The router's knobs."""

from dataclasses import dataclass

from protocol.errors import ConfigError
from router.policy import POLICIES, Disaggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Front doors, limits and timers of the one router. Durations in seconds."""

    grpc_host: str = "127.0.0.1"
    """Interface to listen on. Loopback unless asked otherwise: there is no authentication on this door."""
    grpc_port: int = 50051
    """0: the system chooses a free one."""
    metrics_host: str = "127.0.0.1"
    """Interface on which Prometheus finds the whole deployment's metrics."""
    metrics_port: int = 9464
    """0: the system chooses a free one."""
    otlp_endpoint: str | None = None
    """Where spans of every call go, OTLP over HTTP, as in http://127.0.0.1:4318/v1/traces; None: nowhere."""
    policy: str = "least_loaded"
    """How a replica of each pool is chosen: a name of router/policy.py."""
    disaggregation: Disaggregation = "auto"
    """auto: a decode engine serves colocated while no prefill engine can. strict: such requests wait or are refused.
    colocated: a decode engine always computes the prompt itself.
    """
    min_disaggregated_tokens: int = 0
    """Prompts of which the decode engine lacks fewer tokens than this are computed there."""
    max_message_bytes: int = 4 * 1024 * 1024
    """Largest request; a larger one is refused before it is parsed."""
    max_queue: int = 1024
    """Accepted requests that may wait for a place in the engines, and requests that may be in tokenisation."""
    max_attempts: int = 3
    """Times one request is dispatched before it fails; an attempt given back by an engine does not count."""
    queue_ttl_s: float | None = None
    """Longest wait in the queue; None: only the request's own deadline ends it."""
    status_interval_s: float = 1.0
    """Between two `RouterStatus`."""
    replica_timeout_s: float = 5.0
    """A replica silent for longer is suspected."""
    router_timeout_s: float = 10.0
    """An engine that hears nothing from the router for longer ends the router's requests."""
    tick_interval_s: float = 0.05
    """Between two looks at deadlines and timeouts when nothing else happens."""
    max_buffered_tokens: int = 16384
    """Tokens of one answer that may wait for a client that reads too slowly; beyond, the request is cancelled."""
    write_timeout_s: float = 30.0
    """A client that takes nothing for longer loses its stream."""
    tokenizer_threads: int = 2
    """Threads that tokenise beside the event loop."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        for name in ("grpc_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}: {getattr(self, name)} is not in [0, 65535]")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint: {self.otlp_endpoint!r} is no URL of http or https")
        if self.min_disaggregated_tokens < 0:
            raise ConfigError(f"min_disaggregated_tokens: {self.min_disaggregated_tokens} is below 0")
        for name in ("max_message_bytes", "max_queue", "max_attempts", "max_buffered_tokens", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name in (
            "status_interval_s",
            "replica_timeout_s",
            "router_timeout_s",
            "tick_interval_s",
            "write_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        if self.queue_ttl_s is not None and not self.queue_ttl_s > 0:
            raise ConfigError(f"queue_ttl_s: {self.queue_ttl_s} is not above 0")
        for name in ("replica_timeout_s", "router_timeout_s"):
            if getattr(self, name) <= self.status_interval_s:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is not above status_interval_s {self.status_interval_s}"
                )
