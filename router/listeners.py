"""All ports of a router: which there are, with which certificates, and who may use them."""

from pathlib import Path

from prometheus_client.registry import Collector

from router.accounts import Accounts
from router.config import RouterConfig
from router.frontdoor import FrontDoor
from router.grpc_door import GrpcDoor
from router.http_door import OPEN_PATHS, HttpDoor
from router.http_endpoint import Guard
from router.http_server import HttpServer
from router.listening import Listener
from router.metrics_server import metrics_server
from router.tls import Certificates


def make_listeners(door: FrontDoor, config: RouterConfig, collector: Collector) -> dict[str, Listener]:
    """By the names of `Ports`. Raises ConfigError if certificates or tokens cannot be used."""
    certificates, accounts = None, None
    if config.tls_cert_file is not None and config.tls_key_file is not None:
        certificates = Certificates(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    if config.tokens_file is not None:
        accounts = Accounts(Path(config.tokens_file))
    listeners: dict[str, Listener] = {"grpc_port": GrpcDoor(door, config, certificates=certificates, accounts=accounts)}
    if config.http_port is not None:
        app = HttpDoor(door, config, collector).app()
        listeners["http_port"] = HttpServer(
            Guard(app, accounts, OPEN_PATHS) if accounts is not None else app,
            "http",
            config.http_host,
            config.http_port,
            write_timeout_s=config.write_timeout_s,
            certificates=certificates,
        )
    listeners["metrics_port"] = metrics_server(collector, config, certificates=certificates, accounts=accounts)
    return listeners
