"""How a client reaches its servers: addresses, TLS, tokens, and which failure is tried again.

An address is HOST:PORT or what gRPC takes as a target, `grpc://HOST:PORT` for plaintext, `grpcs://HOST:PORT` for TLS;
several are separated by commas. Calls go to them in turn. One that ends with UNAVAILABLE before its first message is
started again at the next address; after that nobody could tell what the answer has already cost or said.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from twopass.errors import InvalidRequest
from twopass.proxy import is_loopback

MAX_TRIES = 3
"""How often each address is tried unless a client says otherwise."""
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 2.0
"""The wait after all addresses have failed once doubles each time; a random part of it keeps clients apart."""

_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the server says what is too large
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),  # clients of one process share no connection: each may meet another door
)
_TLS_HINTS = (
    ("WRONG_VERSION_NUMBER", "the server speaks plaintext: use grpc://"),
    ("certificate has expired", "the server's certificate has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "no authority that this client knows has signed the server's certificate: give it as ca",
    ),
    ("not in peer certificate", "the server's certificate is for another name than the address has"),
    ("Hostname Verification Check failed", "the server's certificate is for another name than the address has"),
    ("CERTIFICATE_REQUIRED", "the server wants a certificate of its clients: give cert and key"),
    ("certificate required", "the server wants a certificate of its clients: give cert and key"),
)
"""What gRPC's words about a failed handshake mean."""


Pem = str | Path | bytes
"""A PEM file, or what it holds."""


class Place(NamedTuple):
    """One server."""

    target: str
    tls: bool


class Security(NamedTuple):
    """`token`: sent with every call."""

    token: str | None = None
    ca: Pem | None = None
    cert: Pem | None = None
    key: Pem | None = None


def places(address: str | Sequence[str]) -> list[Place]:
    """Raises InvalidRequest for an address that is none."""
    texts = address.split(",") if isinstance(address, str) else list(address)
    found = [_place(text.strip()) for text in texts]
    if not found:
        raise InvalidRequest("address: none is given", field="address")
    return found


def _place(text: str) -> Place:
    scheme, separator, rest = text.partition("://")
    if not text:
        raise InvalidRequest(
            "address: '' is not allowed: HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT", field="address"
        )
    if not separator or rest.startswith("/"):  # dns:///host, unix:///path
        return Place(text, tls=False)
    if scheme not in ("grpc", "grpcs") or not rest:
        raise InvalidRequest(
            f"address: {text!r} is not allowed: HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT", field="address"
        )
    return Place(rest.rstrip("/"), scheme == "grpcs")


def open_channel(place: Place, security: Security, module: Any) -> Any:
    """`module`: grpc or grpc.aio. Connections to this machine use no proxy, whatever the environment says."""
    options = (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_loopback(place.target) else _OPTIONS
    if not place.tls:
        return module.insecure_channel(place.target, options=options)
    ca, cert, key = (_pem(name, getattr(security, name)) for name in ("ca", "cert", "key"))
    if (cert is None) != (key is None):
        raise InvalidRequest("cert, key: one needs the other", field="cert")
    return module.secure_channel(place.target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def _pem(name: str, given: Pem | None) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name}: {given}: {error.strerror}", field=name) from None


def hint(place: Place, details: str) -> str:
    """What a failed connection may be due to, or ""."""
    if place.tls and (meanings := [meaning for words, meaning in _TLS_HINTS if words in details]):
        return meanings[0]
    if not any(words in details for words in ("Socket closed", "Connection reset", "GOAWAY", "Stream removed")):
        return ""
    # With TLS 1.3 a server looks at a client's certificate when the client already takes the handshake for done.
    return (
        "if the server wants a certificate of its clients, give cert and key of one that is valid and that its "
        "authority has signed"
        if place.tls
        else "if the server has TLS, use grpcs://"
    )


class Tries:
    """The attempts of one call: where the next one goes, how long before it, and how much time is left for it.

    `first`: the index of the first address. `max_tries`: how often each is tried.
    """

    def __init__(self, num_places: int, first: int, max_tries: int, timeout_s: float | None) -> None:
        self._num_places, self._first, self._max_tries = num_places, first, max_tries
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_made = 0

    @property
    def place(self) -> int:
        return (self._first + self._num_made) % self._num_places

    @property
    def timeout_s(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def wait_s(self, status: str) -> float | None:
        """After an attempt that ended with `status`: seconds before the next one, or None if there is none."""
        self._num_made += 1
        if status != "UNAVAILABLE" or self._num_made >= self._max_tries * self._num_places:
            return None
        rounds, in_round = divmod(self._num_made, self._num_places)
        if in_round:
            return 0.0
        wait_s = min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** (rounds - 1)) * random.uniform(0.5, 1.0)
        left_s = self.timeout_s
        return wait_s if left_s is None or wait_s < left_s else None
