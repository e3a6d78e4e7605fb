"""`twopass admin ...`: the commands of those who run a deployment."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from twopass.admin import AdminClient, Replica
from twopass.console import reported
from twopass.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, help="Lists, drains and undrains engines, and sets log levels.")

AddressOption = Annotated[str, typer.Option(help="Where router.admin_port is: HOST:PORT or grpcs://HOST:PORT.")]
TokenOption = Annotated[
    str | None,
    typer.Option(envvar="TWOPASS_ADMIN_TOKEN", help="The administrator's bearer token; others see it in `ps`."),
]
TokenFileOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Holds the bearer token instead.")
]
CaOption = Annotated[Path | None, typer.Option(help="PEM file of the authorities to trust, for grpcs://.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Prints JSON.")]
ReplicaArgument = Annotated[str, typer.Argument(help="The engine's name, as in decode-0.")]

ADDRESS = "127.0.0.1:50052"
BLOCK_STATES = ("used", "held", "cached", "blank")
HEAD = (
    "engine",
    "pool",
    "state",
    "epoch",
    "in flight",
    "running",
    "waiting",
    "leases",
    f"blocks {'/'.join(BLOCK_STATES)}",
)


@app.command("list")
@reported
def list_(
    address: AddressOption = ADDRESS,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """Prints every engine: state, what it has to do, and its KV blocks."""
    with _client(address, token, token_file, ca) as client:
        version, replicas = client.version(), client.replicas()
    if json_:
        typer.echo(json.dumps({"version": version, "replicas": [asdict(replica) for replica in replicas]}))
    else:
        typer.echo(f"twopass {version}")
        for line in _lines(replicas):
            typer.echo(line)


@app.command()
@reported
def drain(
    replica: ReplicaArgument,
    address: AddressOption = ADDRESS,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """From now on an engine gets no new requests, even if it is replaced. What it has ends there in its own time."""
    with _client(address, token, token_file, ca) as client:
        drained = client.drain(replica)
    if json_:
        typer.echo(json.dumps({"replica_id": replica, **asdict(drained)}))
        return
    typer.echo(f"{replica} drains; {drained.in_flight} attempts in flight")
    if drained.effect:
        typer.echo(f"warning: {drained.effect}", err=True)


@app.command()
@reported
def undrain(
    replica: ReplicaArgument,
    address: AddressOption = ADDRESS,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """Takes a drain back: the engine gets requests again."""
    with _client(address, token, token_file, ca) as client:
        client.undrain(replica)
    typer.echo(json.dumps({"replica_id": replica}) if json_ else f"{replica} takes requests again")


@app.command("log-level")
@reported
def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    target: Annotated[str, typer.Argument(help="An engine, a door or `router`; all without it.")] = "",
    address: AddressOption = ADDRESS,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """Sets from which level on processes write their logs, within about a second."""
    with _client(address, token, token_file, ca) as client:
        client.set_log_level(level, target)
    whose = target or "all processes"
    typer.echo(json.dumps({"level": level, "target": target}) if json_ else f"the log level of {whose} is {level}")


def _client(address: str, token: str | None, token_file: Path | None, ca: Path | None) -> AdminClient:
    if token is not None and token_file is not None:
        raise InvalidRequest("token, token_file: only one of them can be given", field="token")
    if token_file is not None:
        token = token_file.read_text().strip()
    return AdminClient(address, token=token, ca=ca)


def _lines(replicas: list[Replica]) -> Iterator[str]:
    """A table that is as wide as it has to be, so that no name is cut where it is copied or filtered."""
    rows: list[tuple[str, ...]] = [HEAD]
    for replica in replicas:
        state = f"{replica.state}, drained" if replica.drained and replica.state != "draining" else replica.state
        tasks = (replica.in_flight, replica.num_running, replica.num_waiting, replica.num_leases)
        blocks = "/".join(str(replica.num_blocks[state]) for state in BLOCK_STATES if replica.num_blocks)
        numbers = ["-" if number is None else str(number) for number in (replica.epoch, *tasks)]
        rows.append((replica.replica_id, replica.pool or "-", state, *numbers, blocks or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
