"""The `twopass` command. The client's commands are here; the server's are added where its packages are installed."""

import importlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from twopass.admin_commands import app as admin
from twopass.client import Client
from twopass.console import plain_console, reported
from twopass.types import GenerateOptions

SERVER_COMMANDS = ("serve", "plan", "demo", "replay", "simulate", "token")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Disaggregated LLM serving."
)
app.add_typer(admin, name="admin")
console = plain_console(stderr=True)


@app.command()
@reported
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat a user's message.")],
    server: Annotated[
        str, typer.Option(help="Where the router listens: HOST:PORT or grpcs://HOST:PORT.")
    ] = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    chat: Annotated[bool, typer.Option(help="Wraps the prompt in the model's chat template.")] = False,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that together have this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of the request.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Holds the bearer token.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authorities to trust, for grpcs://.")] = None,
) -> None:
    """Streams one answer."""
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    if seed is not None:
        options["seed"] = seed
    token = None if token_file is None else token_file.read_text().strip()
    with Client(server, timeout_s=timeout_s, token=token, ca=ca) as client:
        messages = [{"role": "user", "content": prompt}]
        chunks = client.chat(messages, **options) if chat else client.generate(prompt, **options)
        for chunk in chunks:
            typer.echo(chunk.text, nl=False)
        typer.echo()


@app.command()
def version() -> None:
    """Prints the version."""
    try:
        typer.echo(package_version("twopass"))
    except PackageNotFoundError:
        typer.echo("not installed: running from the tree")


def main() -> None:
    """Entry point of the console script and of `python -m twopass`."""
    server = _server_commands()
    if server is not None:
        server.register(app)
    else:
        for name in SERVER_COMMANDS:
            settings = {"ignore_unknown_options": True}
            app.command(name, help="Needs the server packages.", context_settings=settings)(_absent)
    app()


def _server_commands() -> ModuleType | None:
    """Returns `cluster.cli`, or None if it or a package that it needs is not installed."""
    try:
        return importlib.import_module("cluster.cli")
    except ImportError:
        return None


def _absent(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    console.print(
        "The server packages are not installed here. In the source tree: pip install -e '.[server]'", style="bold red"
    )
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
