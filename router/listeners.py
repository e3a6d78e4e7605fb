"""All ports of a router: which there are, with which certificates, and who may use them."""

from pathlib import Path

from prometheus_client.registry import Collector

from router.accounts import Accounts
from router.admin import Admin
from router.config import RouterConfig
from router.frontdoor import FrontDoor
from router.grpc_admin import GrpcAdmin
from router.grpc_door import GrpcDoor
from router.http_door import OPEN_PATHS, HttpDoor
from router.http_endpoint import Guard
from router.http_server import HttpServer
from router.listening import Listener
from router.metrics_server import metrics_server
from router.tls import Certificates


class Listeners:
    """Raises ConfigError if certificates or tokens cannot be used."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._certificates: Certificates | None = None
        self._accounts: Accounts | None = None
        if config.tls_cert_file is not None and config.tls_key_file is not None:
            self._certificates = Certificates(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
        if config.tokens_file is not None:
            self._accounts = Accounts(Path(config.tokens_file))

    def of_door(self, door: FrontDoor, collector: Collector | None) -> dict[str, Listener]:
        """By the names of `Ports`. `collector`: what HTTP shows of the metrics, if it shows them."""
        config, certificates, accounts = self._config, self._certificates, self._accounts
        listeners: dict[str, Listener] = {
            "grpc_port": GrpcDoor(door, config, certificates=certificates, accounts=accounts)
        }
        if config.http_port is not None:
            app = HttpDoor(door, config, collector).app()
            listeners["http_port"] = HttpServer(
                Guard(app, accounts, OPEN_PATHS) if accounts is not None else app,
                "http",
                config.http_host,
                config.http_port,
                read_timeout_s=config.read_timeout_s,
                write_timeout_s=config.write_timeout_s,
                certificates=certificates,
                share_port=config.doors > 0,
            )
        return listeners

    def of_core(self, collector: Collector, admin: Admin) -> dict[str, Listener]:
        """By the names of `Ports`."""
        config, certificates = self._config, self._certificates
        listeners: dict[str, Listener] = {
            "metrics_port": metrics_server(collector, config, certificates=certificates, accounts=self._accounts)
        }
        if config.admin_port is not None:
            file = config.admin_tokens_file
            admins = Accounts(Path(file), "admin_tokens_file") if file is not None else None
            listeners["admin_port"] = GrpcAdmin(admin, config, certificates=certificates, admins=admins)
        return listeners
