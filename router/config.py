"""The router's configuration."""

import ipaddress
from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import ConfigError
from router.policy import POLICIES, Disaggregation


class Ports(NamedTuple):
    """Where a router listens. `http_port` is None if it has no HTTP door."""

    grpc_port: int
    http_port: int | None
    metrics_port: int
    admin_port: int | None = None
    """None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The addresses, limits and timers of the router. Durations are in seconds."""

    grpc_host: str = "127.0.0.1"
    """The interface to listen on. One that other machines reach needs TLS, or `insecure`."""
    grpc_port: int = 50051
    """The port to listen on. With 0 the system chooses a free one."""
    http_host: str = "127.0.0.1"
    """The interface on which OpenAI's dialect is served."""
    http_port: int | None = None
    """The port to listen on. With 0 the system chooses a free one. None: there is no HTTP door."""
    metrics_host: str = "127.0.0.1"
    """The interface on which Prometheus finds the whole deployment's metrics."""
    metrics_port: int = 9464
    """The port to listen on. With 0 the system chooses a free one."""
    admin_host: str = "127.0.0.1"
    """The interface on which administrators are served."""
    admin_port: int | None = None
    """The port to listen on. With 0 the system chooses a free one. None: nobody administrates the running system."""
    admin_tokens_file: str | None = None
    """The file of administrators, in the form of `tokens_file`. With None whoever reaches the port is one, which only
    the loopback interface allows, and only where clients need no token either.
    """
    tls_cert_file: str | None = None
    """A PEM file with the certificate chain of all ports, its own first. With None they speak plaintext."""
    tls_key_file: str | None = None
    """The PEM file with the certificate's private key."""
    tls_client_ca_file: str | None = None
    """A PEM file with the authorities of clients, which then need a certificate of one of them."""
    tokens_file: str | None = None
    """The file of those who may call, see router/accounts.py. With None nobody is asked for a token."""
    insecure: bool = False
    """Whether ports that other machines reach may speak plaintext."""
    otlp_endpoint: str | None = None
    """Where the spans of every call go by OTLP over HTTP, as in http://127.0.0.1:4318/v1/traces. None exports none."""
    policy: str = "least_loaded"
    """The rule that chooses a replica of each pool: a name in `POLICIES` of router/policy.py."""
    disaggregation: Disaggregation = "auto"
    """auto: a decode engine serves colocated while no prefill engine can. strict: such requests wait or are refused.
    colocated: a decode engine always computes the prompt itself.
    """
    min_disaggregated_tokens: int = 0
    """A prompt of which the decode engine lacks fewer tokens than this is computed there."""
    max_message_bytes: int = 4 * 1024 * 1024
    """The largest request. A larger one is refused before it is parsed."""
    max_queue: int = 1024
    """How many accepted requests may wait for a place in the engines, and how many requests may be in tokenisation."""
    max_attempts: int = 3
    """How many failed attempts end a request. An attempt that an engine gives back does not count."""
    queue_ttl_s: float | None = None
    """The longest wait in the queue. With None only the request's own deadline ends it."""
    status_interval_s: float = 1.0
    """The time between two `RouterStatus`."""
    replica_timeout_s: float = 5.0
    """A replica that is silent for longer is suspected."""
    router_timeout_s: float = 10.0
    """An engine that hears nothing from the router for longer ends the router's requests."""
    tick_interval_s: float = 0.05
    """The time between two looks at deadlines and timeouts when nothing else happens."""
    max_buffered_tokens: int = 16384
    """How many tokens of one answer may wait for a slow client. If more wait, the request is cancelled."""
    read_timeout_s: float = 30.0
    """A request that takes longer to arrive loses its connection, and so does a connection that brings none."""
    write_timeout_s: float = 30.0
    """A client that takes nothing for longer loses its stream."""
    doors: int = 0
    """How many processes tokenise, detokenise and stream. They share the ports. 0: the router's process does it."""
    tokenizer_threads: int = 2
    """How many threads of each door tokenise beside its event loop."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        for name in ("grpc_port", "http_port", "metrics_port", "admin_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name}: {port} is not in [0, 65535]")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("tls_cert_file, tls_key_file: one needs the other")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_client_ca_file: needs tls_cert_file and tls_key_file")
        if self.tls_cert_file is None and not self.insecure:
            for name in ("grpc_host", "http_host", "metrics_host", "admin_host"):
                if not _is_loopback(host := getattr(self, name)):
                    raise ConfigError(
                        f"{name}: other machines reach {host}, and the port speaks plaintext: give tls_cert_file and "
                        "tls_key_file, or set insecure: true where something before it has TLS"
                    )
        self._check_admin()
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint: {self.otlp_endpoint!r} is no URL of http or https")
        for name in ("min_disaggregated_tokens", "doors"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        for name in ("max_message_bytes", "max_queue", "max_attempts", "max_buffered_tokens", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        timeouts = ("replica_timeout_s", "router_timeout_s")
        for name in ("status_interval_s", *timeouts, "tick_interval_s", "read_timeout_s", "write_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        if self.queue_ttl_s is not None and not self.queue_ttl_s > 0:
            raise ConfigError(f"queue_ttl_s: {self.queue_ttl_s} is not above 0")
        for name in timeouts:
            if (value := getattr(self, name)) <= self.status_interval_s:
                raise ConfigError(f"{name}: {value} is not above status_interval_s {self.status_interval_s}")

    def _check_admin(self) -> None:
        if self.admin_port is None:
            if self.admin_tokens_file is not None:
                raise ConfigError("admin_tokens_file: needs admin_port")
        elif self.admin_tokens_file is None:
            if not _is_loopback(self.admin_host):
                raise ConfigError(f"admin_host: other machines reach {self.admin_host}: give admin_tokens_file")
            if self.tokens_file is not None:
                raise ConfigError("admin_port: clients need a token, and administrators none: give admin_tokens_file")
        elif self.admin_tokens_file == self.tokens_file:
            raise ConfigError("admin_tokens_file: is tokens_file, and every client would be an administrator")

    @property
    def ports(self) -> Ports:
        """Those that are asked for; 0 stands for a free one."""
        return Ports(self.grpc_port, self.http_port, self.metrics_port, self.admin_port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
