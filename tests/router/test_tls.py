"""TLS and tokens on all ports, and what people see when something about them is wrong."""

import asyncio
import os
import re
import shutil
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protocol.errors import ConfigError
from router.accounts import Accounts, hashed
from router.admission import Account
from router.config import RouterConfig
from router.tls import Certificates
from tests.hang import HANG_S
from tests.router.certificates import Authority
from tests.router.http.serving import http_serving
from tests.router.scripted_core import ScriptedCore, Serving, echo
from twopass import AsyncClient
from twopass.errors import AccessDenied, InvalidRequest, Unavailable


def scenario(test: Callable[[Serving], Awaitable[None]], **knobs: Any) -> None:
    async def main() -> None:
        async with http_serving(ScriptedCore(echo), **knobs) as served:
            await test(served)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def files(pair: tuple[str, str]) -> dict[str, str]:
    return {"tls_cert_file": pair[0], "tls_key_file": pair[1]}


async def asked(s: Serving, scheme: str = "grpcs", **options: Any) -> str:
    async with AsyncClient(f"{scheme}://127.0.0.1:{s.ports['grpc_port']}", max_tries=1, **options) as client:
        return (await client.generate_text("<7>", timeout_s=HANG_S)).text


async def refused(s: Serving, scheme: str = "grpcs", **options: Any) -> str:
    with pytest.raises(Unavailable) as raised:
        await asked(s, scheme, **options)
    return str(raised.value)


def test_all_ports_speak_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def test(s: Serving) -> None:
        assert await asked(s, ca=authority.file) == "<7> "
        async with httpx.AsyncClient(verify=trusting(authority), trust_env=False) as client:
            https = {name: f"https://127.0.0.1:{s.ports[name]}" for name in ("http_port", "metrics_port")}
            assert (await client.post(f"{https['http_port']}/v1/completions", json={"prompt": "<7>"})).is_success
            assert (await client.get(f"{https['metrics_port']}/metrics")).is_success

    scenario(test, **files(authority.sign("server")))


HTTP_PORTS = ("http_port", "metrics_port")


def trusting(authority: Authority, pair: tuple[str, str] | None = None) -> ssl.SSLContext:
    """What an HTTP client trusts, and the files of its own certificate."""
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


async def scraped(s: Serving, port: str, context: ssl.SSLContext | None) -> int:
    """The status of GET /metrics, over plaintext without a context."""
    url = f"{'http' if context is None else 'https'}://127.0.0.1:{s.ports[port]}/metrics"
    async with httpx.AsyncClient(verify=context or True, trust_env=False, timeout=HANG_S) as client:
        return (await client.get(url, follow_redirects=True)).status_code


async def not_scraped(s: Serving, context: ssl.SSLContext | None, reason: str | None = None) -> None:
    """`reason`: what httpx says of both ports, if that is always the same."""
    for port in HTTP_PORTS:
        with pytest.raises(httpx.TransportError, match=reason):
            await scraped(s, port, context)


def test_what_people_see_when_the_two_do_not_fit(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")

    async def secure(s: Serving) -> None:
        assert "no authority that this client knows" in await refused(s, ca=stranger.file)
        await not_scraped(s, trusting(stranger), "unable to get local issuer")
        assert "use grpcs://" in await refused(s, "grpc")
        await not_scraped(s, None, "disconnected without sending a response")
        for port in HTTP_PORTS:
            assert await scraped(s, port, trusting(authority)) == 200

    async def other_name(s: Serving) -> None:
        assert "for another name" in await refused(s, ca=authority.file)
        await not_scraped(s, trusting(authority), "IP address mismatch")

    async def plain(s: Serving) -> None:
        assert "use grpc://" in await refused(s, ca=authority.file)
        await not_scraped(s, trusting(authority), "wrong version number|WRONG_VERSION_NUMBER|record layer failure")
        for port in HTTP_PORTS:
            assert await scraped(s, port, None) == 200

    scenario(secure, **files(authority.sign("server")))
    scenario(other_name, **files(authority.sign("elsewhere", address="127.0.0.9")))
    scenario(plain)


def test_a_certificate_that_expires_while_it_is_used_is_named_by_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setattr("router.tls._check_dates", lambda *_: None)  # it was valid when the router started

    async def test(s: Serving) -> None:
        assert "the server's certificate has expired" in await refused(s, ca=authority.file)
        await not_scraped(s, trusting(authority), "certificate has expired")

    scenario(test, **files(authority.sign("server", days=-1)))


def test_clients_need_a_certificate_where_their_authority_is_named(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    good = authority.sign("client")

    async def test(s: Serving) -> None:
        assert await asked(s, ca=authority.file, cert=good[0], key=good[1]) == "<7> "
        for port in HTTP_PORTS:
            assert await scraped(s, port, trusting(authority, good)) == 200
        for pair in (None, stranger.sign("other"), authority.sign("expired", days=-1)):
            options = {} if pair is None else {"cert": pair[0], "key": pair[1]}
            assert "give cert and key" in await refused(s, ca=authority.file, **options)
            await not_scraped(s, trusting(authority, pair))
        with pytest.raises(InvalidRequest, match="cert, key: one needs the other"):
            await asked(s, ca=authority.file, cert=good[0])

    scenario(test, **files(authority.sign("server")), tls_client_ca_file=authority.file)


def test_a_handshake_that_does_not_come_to_its_end_is_cut_off(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def test(s: Serving) -> None:
        for port in s.ports.values():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01\x02\x00")  # a record of 512 bytes begins
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert await asked(s, ca=authority.file) == "<7> "
        assert await scraped(s, "metrics_port", trusting(authority)) == 200

    scenario(test, **files(authority.sign("server")), admin_port=0, read_timeout_s=0.2)


def test_a_new_certificate_needs_no_restart_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    cert, key = first.sign("server")

    async def test(s: Serving) -> None:
        url = f"https://127.0.0.1:{s.ports['http_port']}/health"
        Path(cert).write_text("broken")
        assert await asked(s, ca=first.file) == "<7> "
        for source, target in zip(second.sign("next"), (cert, key), strict=True):
            shutil.copy(source, f"{target}.new")
            os.replace(f"{target}.new", target)
        assert await asked(s, ca=second.file) == "<7> "
        async with httpx.AsyncClient(verify=trusting(second), trust_env=False) as client:
            assert (await client.get(url)).is_success
        assert await scraped(s, "metrics_port", trusting(second)) == 200
        assert "no authority that this client knows" in await refused(s, ca=first.file)
        await not_scraped(s, trusting(first), "certificate verify failed")

    scenario(test, **files((cert, key)))


def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("server")
    _, other_key = authority.sign("other")
    expired, expired_key = authority.sign("expired", days=-1)
    for pair, reason in [
        ((expired, expired_key), f"tls_cert_file: {expired}: expired on"),
        ((cert, other_key), f"tls_key_file: {other_key}: no key of {cert}"),
        ((f"{cert}.no", key), "tls_cert_file: .*No such file"),
        ((key, key), f"tls_cert_file: {key}: no certificate in PEM"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            Certificates(*pair, None)
    with pytest.raises(ConfigError, match=re.escape("grpc_host: other machines reach 0.0.0.0")):
        RouterConfig(grpc_host="0.0.0.0")
    assert RouterConfig(grpc_host="0.0.0.0", insecure=True)
    with pytest.raises(ConfigError, match="one needs the other"):
        RouterConfig(tls_cert_file=cert)


def entry(name: str, token: str, **limits: int) -> str:
    return f"- name: {name}\n  sha256: {hashed(token)}\n" + "".join(f"  {k}: {v}\n" for k, v in limits.items())


def test_tokens_are_asked_for_on_every_port(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(entry("alice", "a-token"))

    async def test(s: Serving) -> None:
        assert await asked(s, "grpc", token="a-token") == "<7> "
        _, request = s.core.calls.get_nowait()
        assert request.account.name == "alice"
        for token, reason in ((None, "a bearer token is needed"), ("other", "the token is not known here")):
            with pytest.raises(AccessDenied, match=reason):
                await asked(s, "grpc", token=token)
        async with httpx.AsyncClient(trust_env=False) as client:
            http, metrics = (f"http://127.0.0.1:{s.ports[name]}" for name in ("http_port", "metrics_port"))
            for url, open_to_all in ((f"{http}/health", True), (f"{http}/v1/models", False), (metrics, False)):
                status = (await client.get(url)).status_code
                assert status == (200 if open_to_all else 401)
                known = await client.get(url, headers={"authorization": "Bearer a-token"}, follow_redirects=True)
                assert known.is_success
        async with grpc.aio.insecure_channel(f"127.0.0.1:{s.ports['grpc_port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        path.write_text(entry("bob", "b-token"))
        assert await asked(s, "grpc", token="b-token") == "<7> "
        path.write_text("- name: 5\n")
        assert await asked(s, "grpc", token="b-token") == "<7> "

    scenario(test, tokens_file=str(path))


def test_a_call_has_its_token_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looked_up = tmp_path / "tokens.yaml", list[str | None]()
    path.write_text(entry("alice", "a-token"))
    authenticate = Accounts.authenticate

    def counting(accounts: Accounts, header: str | None) -> Account:
        looked_up.append(header)
        return authenticate(accounts, header)

    async def test(s: Serving) -> None:
        monkeypatch.setattr(Accounts, "authenticate", counting)
        assert await asked(s, "grpc", token="a-token") == "<7> "
        async with httpx.AsyncClient(headers={"authorization": "Bearer a-token"}, trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{s.ports['http_port']}/v1/models")).is_success
        assert looked_up == ["Bearer a-token"] * 2

    scenario(test, tokens_file=str(path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- name: x\n", "0.sha256: Field required"),
        (entry("a", "1") + entry("a", "2"), "name: a is there twice"),
        (entry("a", "1", max_in_flight=0), "0.max_in_flight: .* greater than or equal to 1"),
        ("{", "no YAML"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_named_at_the_start(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"tokens_file: {path}: {reason}"):
        Accounts(path)
