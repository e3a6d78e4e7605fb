"""Certificates of all ports: checked when the router starts, and read again when their files change.

Both kinds of server ask for the present certificate at each handshake, so a new one needs no restart. Connections that
are open keep the one that they began with. Files that have become unusable change nothing, and are told to the log.
"""

import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import grpc
from cryptography import x509

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int], ...]
"""By file: inode, size, and time of the last change in ns."""


class _Loaded(NamedTuple):
    context: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class Certificates:
    """What `tls_cert_file`, `tls_key_file` and `tls_client_ca_file` hold. With the last one, clients need a certificate
    of it.
    """

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str | None) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._cert, self._key = Path(cert_file), Path(key_file)
        self._client_ca = Path(client_ca_file) if client_ca_file is not None else None
        self._stamp = self._stamp_now()
        self._loaded = self._load()

    def context(self) -> ssl.SSLContext:
        """For asyncio's servers. At each handshake it gives way to the newest."""
        return self._loaded.context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC's servers."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.grpc,
            lambda: self._newest().grpc,
            require_client_authentication=self._client_ca is not None,
        )

    def _newest(self) -> _Loaded:
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                self._loaded = self._load()
                log.info("certificates: read again")
        except ConfigError as error:
            log.error("certificates: %s; those before stay", error)
        return self._loaded

    def _stamp_now(self) -> Stamp:
        stats = [_read("tls_cert_file", self._cert, Path.stat), _read("tls_key_file", self._key, Path.stat)]
        if self._client_ca is not None:
            stats.append(_read("tls_client_ca_file", self._client_ca, Path.stat))
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _load(self) -> _Loaded:
        chain = _read("tls_cert_file", self._cert, Path.read_bytes)
        key = _read("tls_key_file", self._key, Path.read_bytes)
        _check_dates("tls_cert_file", self._cert, chain)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"tls_key_file: {self._key}: no key of {self._cert}: {error}") from None
        roots = None
        if self._client_ca is not None:
            roots = _read("tls_client_ca_file", self._client_ca, Path.read_bytes)
            _check_dates("tls_client_ca_file", self._client_ca, roots)
            context.load_verify_locations(cadata=roots.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        context.sni_callback = self._renew
        return _Loaded(context, grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots))

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        newest = self._newest().context
        if newest is not context:
            connection.context = newest


def _read(knob: str, path: Path, how: Callable[[Path], T]) -> T:
    try:
        return how(path)
    except OSError as error:
        raise ConfigError(f"{knob}: {path}: {error.strerror}") from None


def _check_dates(knob: str, path: Path, data: bytes) -> None:
    """Raises ConfigError unless the certificates are valid today."""
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{knob}: {path}: no certificate in PEM: {error}") from None
    now = datetime.now(UTC)
    for certificate in certificates:
        if now > certificate.not_valid_after_utc:
            raise ConfigError(f"{knob}: {path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
        if now < certificate.not_valid_before_utc:
            raise ConfigError(f"{knob}: {path}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d}")
