"""The administrators' service over a scripted core: what it says, who may ask, and what configurations are refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from protocol.errors import ConfigError
from protocol.log import LogLevel
from protocol.messages import Address, Hello, ReplicaStatus
from router.accounts import new_token
from router.admin import Admin, Orders
from router.config import RouterConfig
from router.policy import ReplicaView
from tests.hang import HANG_S
from tests.router.certificates import Authority
from tests.router.http.serving import http_serving
from tests.router.router_world import World
from tests.router.scripted_core import ScriptedCore, Serving
from twopass.__main__ import app
from twopass.admin import AdminClient
from twopass.errors import AccessDenied, InvalidRequest, NotFound, NotSupported


def core() -> ScriptedCore:
    """One engine that has told its load, and one that has not yet."""
    hello = Hello(
        role="decode",
        layout_fingerprint=b"l",
        block_size=16,
        num_blocks=101,
        max_num_seqs=8,
        max_model_len=10_000,
        max_prompt_tokens=9999,
        endpoint=b"",
    )
    status = ReplicaStatus(
        state="up",
        seq=3,
        num_waiting=1,
        num_running=2,
        num_leases=5,
        num_pulls=4,
        num_early_handoffs=0,
        num_free_blocks=60,
        num_cached_blocks=20,
        num_held_blocks=10,
    )
    made = ScriptedCore()
    made.engines = [
        ReplicaView(Address("decode-0", 7), hello, 0.0, "up", 3, status=status),
        ReplicaView(Address("decode-1", 8), hello, 0.0, "suspected"),
    ]
    return made


def scenario(test: Callable[[Serving, str], Awaitable[None]], **knobs: Any) -> None:
    async def main() -> None:
        async with http_serving(core(), **{"admin_port": 0, **knobs}) as served:
            await test(served, f"127.0.0.1:{served.ports['admin_port']}")

    asyncio.run(asyncio.wait_for(main(), HANG_S))


async def asked(address: str, ask: Callable[[AdminClient], Any], **options: Any) -> Any:
    def call() -> Any:
        with AdminClient(address, timeout_s=HANG_S, **options) as client:
            return ask(client)

    return await asyncio.to_thread(call)


async def commanded(address: str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    command = ["admin", *arguments, "--address", address]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, command, env=env))


def test_what_the_service_says_and_does() -> None:
    async def test(s: Serving, address: str) -> None:
        first, second = await asked(address, AdminClient.replicas)
        assert (first.replica_id, first.pool, first.state, first.drained) == ("decode-0", "decode", "up", False)
        assert (first.epoch, first.in_flight, first.num_waiting, first.num_running, first.num_leases) == (7, 3, 1, 2, 5)
        assert first.num_blocks == {"used": 30, "held": 10, "cached": 20, "blank": 40}
        assert (second.state, second.num_waiting, dict(second.num_blocks)) == ("suspected", None, {})
        drained = await asked(address, lambda client: client.drain("decode-0"))
        assert (drained.in_flight, drained.effect) == (3, "an effect")
        assert [replica.drained for replica in await asked(address, AdminClient.replicas)] == [True, False]
        await asked(address, lambda client: client.undrain("decode-0"))
        assert not s.core.drained_replicas
        with pytest.raises(NotFound, match=r"replica: 'decode-7' is not found: the engines are decode-0, decode-1"):
            await asked(address, lambda client: client.drain("decode-7"))

    scenario(test)


def test_log_levels() -> None:
    world = World()
    admin = Admin(world.router, pump=lambda: None, doors=lambda: ["door-0"], clock=world.clock)

    def levels() -> list[LogLevel | None]:
        return [admin.orders.level_of(name) for name in ("router", "door-0", "decode-0")]

    assert levels() == [None] * 3
    admin.set_log_level("debug", "door-0")
    assert levels() == [None, "debug", None]
    admin.set_log_level("error", "")
    assert levels() == ["error"] * 3
    admin.set_log_level("info", "decode-0")
    next_admin = Admin(World().router, pump=lambda: None, doors=list, clock=world.clock)
    next_admin.restore(admin.orders)
    assert next_admin.orders == Orders(frozenset(), {"": "error", "decode-0": "info"})


def test_engines_that_are_away_are_listed() -> None:
    world = World()
    admin = Admin(world.router, pump=lambda: None, doors=list, clock=world.clock)
    admin.drain("decode-0")
    world.router.replica_down(Address("decode-0", 6))
    decode, prefill = admin.replicas()
    assert (decode.replica_id, decode.pool, decode.drained, decode.view) == ("decode-0", "decode", True, None)
    assert prefill.view is not None and not prefill.drained


def test_only_an_administrators_token_opens_it(tmp_path: Path) -> None:
    tokens = {}
    for kind in ("client", "admin"):
        tokens[kind], entry = new_token(kind)
        (tmp_path / kind).write_text(entry)
    knobs = {"tokens_file": str(tmp_path / "client"), "admin_tokens_file": str(tmp_path / "admin")}

    async def test(s: Serving, address: str) -> None:
        calls: list[Callable[[AdminClient], Any]] = [
            AdminClient.replicas,
            lambda client: client.drain("decode-0"),
            lambda client: client.undrain("decode-0"),
            lambda client: client.set_log_level("debug"),
        ]
        for call in calls:
            for token, why in ((None, "is needed"), ("wrong", "not known"), (tokens["client"], "not known")):
                with pytest.raises(AccessDenied, match=why):
                    await asked(address, call, token=token)
        assert not s.core.drained_replicas
        for call in calls:
            await asked(address, call, token=tokens["admin"])
        refused = await commanded(address, "drain", "decode-0")
        assert refused.exit_code == 2 and "AccessDenied: authorization: a bearer token is needed" in refused.output
        (tmp_path / "token").write_text(tokens["admin"] + "\n")
        assert (await commanded(address, "drain", "decode-0", "--token-file", str(tmp_path / "token"))).exit_code == 0
        assert (await commanded(address, "list", env={"TWOPASS_ADMIN_TOKEN": tokens["admin"]})).exit_code == 0

    scenario(test, **knobs)


def test_it_speaks_tls_like_all_ports(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("server")

    async def test(s: Serving, address: str) -> None:
        assert len(await asked(f"grpcs://{address}", AdminClient.replicas, ca=authority.file)) == 2

    scenario(test, tls_cert_file=cert, tls_key_file=key)


def test_the_commands() -> None:
    async def test(s: Serving, address: str) -> None:
        listed = await commanded(address, "list")
        assert listed.exit_code == 0 and "decode-0" in listed.output and "suspected" in listed.output
        tree = json.loads((await commanded(address, "list", "--json")).stdout)
        assert [replica["replica_id"] for replica in tree["replicas"]] == ["decode-0", "decode-1"]
        drained = await commanded(address, "drain", "decode-0")
        assert drained.stdout == "decode-0 drains; 3 attempts in flight\n" and "warning: an effect" in drained.stderr
        assert (await commanded(address, "undrain", "decode-0")).stdout == "decode-0 takes requests again\n"
        assert (await commanded(address, "log-level", "debug")).stdout == "the log level of all processes is debug\n"
        for arguments, why in (
            (("drain", "decode-7"), "NotFound: replica: 'decode-7' is not found: the engines are decode-0, decode-1"),
            (("log-level", "loud"), "InvalidRequest: level: 'loud' is not allowed: one of debug, info, warning, error"),
            (
                ("log-level", "info", "x"),
                "NotFound: target: 'x' is not found: the processes are decode-0, decode-1, do",
            ),
        ):
            refused = await commanded(address, *arguments)
            assert refused.exit_code == 2 and why in refused.output, refused.output
        with pytest.raises(NotSupported, match=r"serves no administrators; their port is router\.admin_port"):
            await asked(f"127.0.0.1:{s.ports['grpc_port']}", AdminClient.replicas)

    scenario(test)
    with pytest.raises(InvalidRequest, match="address: 'a:1,b:2' is several"):
        AdminClient("a:1,b:2")


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"admin_port": 65536}, "admin_port: 65536 is not in"),
        ({"admin_tokens_file": "a"}, "admin_tokens_file: needs admin_port"),
        ({"admin_port": 0, "admin_host": "0.0.0.0"}, "admin_host: other machines reach 0.0.0.0, and the port speaks"),
        ({"admin_port": 0, "admin_host": "0.0.0.0", "insecure": True}, "admin_host: .* give admin_tokens_file"),
        ({"admin_port": 0, "tokens_file": "a"}, "admin_port: clients need a token, and administrators none"),
        ({"admin_port": 0, "tokens_file": "a", "admin_tokens_file": "a"}, "every client would be an administrator"),
    ],
)
def test_configurations_that_would_let_anybody_in(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RouterConfig(**knobs)


def test_a_file_that_cannot_be_used_is_named_by_its_own_knob(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^admin_tokens_file: .*: No such file"):
        scenario(lambda s, address: asyncio.sleep(0), admin_tokens_file=str(tmp_path / "none"))
