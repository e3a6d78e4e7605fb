"""Which connections go through a proxy. gRPC itself decides whether it asks the proxy of the test."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.router.scripted_core import ScriptedCore, Serving, echo, scenario
from twopass import AsyncClient, Client, DeadlineExceeded, Unavailable
from twopass.__main__ import app
from twopass.proxy import EXCEPTIONS, VARIABLES, is_loopback, proxy_of


class Proxy:
    """A proxy that answers 403 and remembers what it was asked for."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.asked: list[str] = []
        """The hosts and ports that it was asked for."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4096).decode().split()[1])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in (*VARIABLES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
    proxy = Proxy()
    yield proxy
    proxy.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("0.0.0.0:50051", True),
        ("[::]:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("unix:/tmp/socket", True),
        ("10.0.0.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("localhost.example:50051", False),
        ("dns:///router:50051", False),
        ("router", False),
    ],
)
def test_loopback_has_many_names(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"http_proxy": "P"}, "192.0.2.1:7"),
        ({"https_proxy": "P"}, "router.invalid:7"),
        ({"grpc_proxy": "P", "https_proxy": "http://127.0.0.1:1"}, "192.0.2.1:7"),
        ({"grpc_proxy": "", "http_proxy": "P"}, "192.0.2.1:7"),
        ({"http_proxy": "P", "no_proxy": "192.0.2.1"}, "192.0.2.1:7"),
        ({"http_proxy": "P", "no_proxy": "other, 192.0.2.0/24"}, "192.0.2.1:7"),
        ({"http_proxy": "P", "no_proxy": ".invalid"}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": "outer.invalid"}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": ".router.invalid"}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": "INVALID"}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": ""}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": "*"}, "router.invalid:7"),
        ({"http_proxy": "P", "no_proxy": "router.invalid", "no_grpc_proxy": "other"}, "router.invalid:7"),
        ({"http_proxy": "P"}, "[2001:db8::1]:7"),
        ({"http_proxy": "P", "no_proxy": "2001:db8::/32"}, "[2001:db8::1]:7"),
        ({"http_proxy": "Q"}, "192.0.2.1:7"),
    ],
)
def test_what_the_error_names_is_what_grpc_asks(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: str
) -> None:
    url = {"P": f"http://someone:secret@127.0.0.1:{proxy.port}", "Q": f"socks5://127.0.0.1:{proxy.port}"}
    for name, value in environment.items():
        monkeypatch.setenv(name, url.get(value, value))
    with Client(address, timeout_s=0.5) as client, pytest.raises((Unavailable, DeadlineExceeded)) as caught:
        client.model_info()
    assert bool(proxy.asked) == (proxy_of(address) is not None)
    if proxy.asked:
        assert isinstance(caught.value, Unavailable) and f"proxy=http://127.0.0.1:{proxy.port}: " in str(caught.value)
        assert "no_proxy" in str(caught.value) and "secret" not in str(caught.value)


def test_client_and_command_line_go_straight_to_this_machine(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")

    def ask(address: str) -> None:
        with Client(address, timeout_s=20) as client:
            assert client.generate_text("<3>").token_ids == [3]
            assert client.model_info().model == "arithmetic"
        result = CliRunner().invoke(app, ["generate", "<3> <4>", "--server", address])
        assert (result.exit_code, result.stdout) == (0, "<3> <4> \n")

    async def test(s: Serving) -> None:
        for address in (s.address, s.address.replace("127.0.0.1", "localhost")):
            async with AsyncClient(address, timeout_s=20) as client:
                assert (await client.generate_text("<3>")).token_ids == [3]
            await asyncio.to_thread(ask, address)

    scenario(test, ScriptedCore(echo))
    assert proxy.asked == []


def test_every_kind_of_call_names_the_proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")

    async def ask() -> None:
        async with AsyncClient("192.0.2.1:7", timeout_s=20) as client:
            for call in (client.generate("<3>").read(), client.model_info()):
                with pytest.raises(
                    Unavailable, match="192.0.2.1:7 is reached through a proxy, http_proxy=http://127.0.0.1:"
                ):
                    await call

    asyncio.run(ask())
    with Client("192.0.2.1:7", timeout_s=20) as client, pytest.raises(Unavailable, match="reached through a proxy"):
        client.generate("<3>").read()
    result = CliRunner().invoke(app, ["generate", "<3>", "--server", "192.0.2.1:7"])
    assert result.exit_code == 2 and "reached through a proxy" in result.stderr
