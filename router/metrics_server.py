"""The port that Prometheus scrapes."""

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from router.accounts import Accounts
from router.config import RouterConfig
from router.http_endpoint import Guard
from router.http_server import HttpServer
from router.tls import Certificates


def metrics_server(
    collector: Collector,
    config: RouterConfig,
    *,
    certificates: Certificates | None = None,
    accounts: Accounts | None = None,
) -> HttpServer:
    """Collects on the event loop that changes the numbers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    app: ASGIApp = make_asgi_app(registry)
    return HttpServer(
        Guard(app, accounts) if accounts is not None else app,
        "metrics",
        config.metrics_host,
        config.metrics_port,
        read_timeout_s=config.read_timeout_s,
        write_timeout_s=config.write_timeout_s,
        certificates=certificates,
    )
