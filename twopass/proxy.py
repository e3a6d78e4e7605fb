"""Which proxy gRPC takes from the environment for an address, and which addresses never go through one."""

import ipaddress
import os

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The first of these that is set counts. If it is empty, there is no proxy."""
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""The first of these that is set counts. It lists hosts, ends of host names, and networks such as 10.0.0.0/8."""


def is_loopback(address: str) -> bool:
    """Whether an address is on this machine. `address`: host:port, or with a scheme of gRPC such as unix:PATH."""
    scheme, host = _split(address)
    if scheme in ("unix", "unix-abstract", "vsock") or host == "localhost" or host.endswith(".localhost"):
        return True
    ip = _ip(host)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


def proxy_of(address: str) -> str | None:
    """Returns `VARIABLE=URL` of the proxy for connections to `address`, without user and password, or None."""
    variable = _first(VARIABLES)
    if variable is None or is_loopback(address):
        return None
    if not os.environ[variable].startswith("http://"):  # gRPC supports no other scheme
        return None
    host, exceptions = _split(address)[1], _first(EXCEPTIONS)
    if exceptions is not None and any(_names(entry.strip(), host) for entry in os.environ[exceptions].split(",")):
        return None
    return f"{variable}=http://{os.environ[variable].removeprefix('http://').rpartition('@')[2]}"


def _first(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)


def _names(entry: str, host: str) -> bool:
    """Whether an entry of `EXCEPTIONS` covers a host."""
    ip = _ip(host)
    if ip is None:
        name = entry.removeprefix(".").lower()
        return bool(name) and f".{host.lower()}".endswith(f".{name}")
    try:
        return ip in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _split(address: str) -> tuple[str, str]:
    """Returns scheme and host. The scheme is "" if none is given."""
    scheme, _, rest = address.rpartition(":///") if ":///" in address else ("", "", address)
    for name in ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:"):
        if rest.startswith(name):
            scheme, rest = name.removesuffix(":"), rest.removeprefix(name)
    if rest.startswith("["):
        return scheme, rest[1:].partition("]")[0]
    return scheme, rest if rest.count(":") > 1 else rest.partition(":")[0]


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
