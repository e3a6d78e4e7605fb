"""The client with nothing beside it but the packages that it names as its own: what `pip install .` gives people."""

import asyncio
import json
import shutil
import sys
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from router.accounts import hashed
from tests.hang import HANG_S
from tests.router.certificates import Authority
from tests.router.http.serving import http_serving
from tests.router.scripted_core import ScriptedCore, echo

ROOT = Path(__file__).parents[2]

ASK = """
import asyncio, json, sys
from twopass import AsyncClient, Client
async def ask(address, options):
    async with AsyncClient(address, **options) as client:
        return (await client.generate_text("<7>")).text
for address, options in json.loads(sys.argv[1]):
    with Client(address, **options) as client:
        stream = client.generate("<7>")
        print(client.generate_text("<7>").text, "".join(chunk.text for chunk in stream), end="")  # one beside the other
    print("", asyncio.run(ask(address, options)))
"""
COMMAND = "from twopass.__main__ import main; main()"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `sys.path`: the package, and all that it and what it needs require without extras."""
    folder, waiting, seen = tmp_path_factory.mktemp("packages"), ["twopass"], set[str]()
    shutil.copytree(ROOT / "twopass", folder / "twopass", ignore=shutil.ignore_patterns("__pycache__"))
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform
        needed = map(Requirement, found.requires or ())
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        for file in found.files or ():
            target = folder / file
            if name != "twopass" and ".." not in file.parts and file.suffix != ".pyc":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.locate())
    return folder


async def run(packages: Path, code: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of an interpreter that finds `packages` and the standard library alone."""
    code = f"import sys; sys.path.insert(0, {str(packages)!r})\n{code}"
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", code, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await running.communicate()
    assert running.returncode is not None
    return running.returncode, output.decode()


def test_it_talks_to_every_kind_of_server(packages: Path, tmp_path: Path) -> None:
    authority, token, tokens, token_file = Authority(tmp_path), "a-token", tmp_path / "tokens.yaml", tmp_path / "token"
    server, client = authority.sign("server"), authority.sign("client")
    tokens.write_text(f"- name: alice\n  sha256: {hashed(token)}\n")
    token_file.write_text(f"{token}\n")
    admins = shutil.copy(tokens, tmp_path / "admins.yaml")
    tls = {"tls_cert_file": server[0], "tls_key_file": server[1]}
    servers: dict[str, dict[str, Any]] = {
        "plain": {},
        "tls": tls,
        "mtls": {**tls, "tls_client_ca_file": authority.file},
        "token": {**tls, "tokens_file": str(tokens), "admin_port": 0, "admin_tokens_file": str(admins)},
    }

    async def main() -> None:
        async with AsyncExitStack() as serving:
            at: dict[str, str] = {}
            ports: dict[str, int] = {}
            for name, knobs in servers.items():
                served = await serving.enter_async_context(http_serving(ScriptedCore(echo), **knobs))
                ports |= served.ports
                at[name] = f"{'grpcs' if knobs else 'grpc'}://127.0.0.1:{served.ports['grpc_port']}"
            trust = {"ca": authority.file}
            cases: list[tuple[str, dict[str, Any]]] = [
                (at["plain"].removeprefix("grpc://"), {}),
                (f"{at['plain']},{at['tls']}", trust),
                (at["tls"], trust),
                (at["mtls"], {**trust, "cert": client[0], "key": client[1]}),
                (at["token"], {**trust, "token": token}),
            ]
            assert await run(packages, ASK, json.dumps(cases)) == (0, "<7>  <7>  <7> \n" * len(cases))
            asked = ("generate", "<7>", "--server", at["token"], "--ca", authority.file)
            assert await run(packages, COMMAND, *asked, "--token-file", str(token_file)) == (0, "<7> \n")
            code, output = await run(packages, COMMAND, *asked)
            assert code == 2 and "AccessDenied: authorization: a bearer token is needed" in output
            listed = ("admin", "list", "--address", f"grpcs://127.0.0.1:{ports['admin_port']}", "--ca", authority.file)
            code, output = await run(packages, COMMAND, *listed, "--token-file", str(token_file))
            assert (code, output.startswith("twopass ")) == (0, True), output

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_nothing_of_the_server_is_there(packages: Path) -> None:
    async def main() -> None:
        for name in ("router", "cluster", "numpy", "torch", "ray", "starlette", "yaml"):
            assert "ModuleNotFoundError" in (await run(packages, f"import {name}"))[1]
        code, output = await run(packages, COMMAND, "serve")
        assert code == 2 and "server packages are not installed" in output

    asyncio.run(asyncio.wait_for(main(), HANG_S))
