"""The server's commands: serve, plan, simulate, demo and replay. Each imports its heavy modules only when it runs."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from cluster.stop_request import STOP_SIGNALS, StopRequest
from protocol import start_times  # before what takes long to import
from protocol.errors import ConfigError, TwopassError
from twopass.console import plain_console
from twopass.errors import TwopassError as ClientError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

P = ParamSpec("P")

DRAIN_S = 30.0

console = plain_console(stderr=True)


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    for starting in (serve, demo):
        app.command()(_ending_here(_reported(starting)))
    for command in (plan, simulate, replay, token):
        app.command()(_reported(command))


def _reported(command: Callable[P, None]) -> Callable[P, None]:
    """An error that twopass raises on purpose ends the command with one line and exit code 2."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (TwopassError, ClientError) as error:
            console.print(f"{type(error).__name__}: {error}", style="bold red")
            raise typer.Exit(2) from None

    return run


def _ending_here(command: Callable[P, None]) -> Callable[P, None]:
    """The process ends with the command, without waiting for the threads of Ray in it, which may hang."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, STOP_SIGNALS
        )  # so that signals interrupt no import, and no other thread
        code = 0
        try:
            command(*args, **kwargs)
        except typer.Exit as ended:
            code = ended.exit_code
        with suppress(OSError):  # nobody may be there to read
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    return run


ConfigOption = Annotated[Path | None, typer.Option(help="YAML file; deploy/local.yaml is an example.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, as in decode.max_num_seqs=64."),
]

TimingsOption = Annotated[bool, typer.Option("--timings", help="Prints where the time of start and end went.")]


def serve(
    config: ConfigOption = None,
    set_: SetOption = None,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that open requests get to end in after the first Ctrl-C or SIGTERM.")
    ] = DRAIN_S,
    timings: TimingsOption = False,
) -> None:
    """Runs a deployment until Ctrl-C or SIGTERM, then drains it."""
    from cluster.config import load

    loaded = load(config, set_ or [])
    from cluster.ray_address import job_warning
    from cluster.serve import Deployment
    from cluster.timings import COMMAND, timings_table

    start_times.note_imports()
    stop = StopRequest()
    try:
        stop.listen()
        if warning := job_warning(drain_s):
            console.print(f"warning: {warning}", style="yellow")
        with Deployment(loaded, console.print) as deployment:
            stop.serving, ports = True, deployment.ports
            console.print(f"serving on {_reached_at(loaded.router.grpc_host, ports.grpc_port)}; Ctrl-C drains")
            if ports.http_port is not None:
                console.print(f"OpenAI API on http://{_reached_at(loaded.router.http_host, ports.http_port, '/v1')}")
            console.print(
                f"metrics on http://{_reached_at(loaded.router.metrics_host, ports.metrics_port, '/metrics')}"
            )
            if ports.admin_port is not None:
                console.print(f"twopass admin --address {_reached_at(loaded.router.admin_host, ports.admin_port)}")
            if timings:
                console.print(timings_table(deployment.start_times()))
            while not stop.asked:
                deployment.watch()
            console.print(f"draining, at most {drain_s:g} s; Ctrl-C again stops at once")
            with start_times.phase("drain"):
                num_lost = deployment.drain(drain_s)
            stopping = start_times.now()
            if num_lost is None:
                console.print("stopping; the router died, what was open is lost")
            else:
                console.print(f"stopping; {num_lost} requests did not end in time" if num_lost else "drained, stopping")
            stop.ignore()
        start_times.note("stop", stopping)
        if timings:
            console.print(timings_table({COMMAND: start_times.phases()}))
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


def _reached_at(host: str, port: int, path: str = "") -> str:
    """The address that a client on this machine connects to. A wildcard such as 0.0.0.0 is shown as localhost."""
    if host in ("0.0.0.0", "::"):
        return f"localhost:{port}{path}, as on every interface"
    return f"[{host}]:{port}{path}" if ":" in host else f"{host}:{port}{path}"


def plan(
    config: ConfigOption = None,
    set_: SetOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a typical request.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a typical request.")] = 256,
    running: Annotated[
        int | None,
        typer.Option(min=1, help="Answers being written at once, over all engines; default: one for every seat."),
    ] = None,
    device_memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of one GPU; default: that of the first GPU here.")
    ] = None,
    gb_per_s: Annotated[
        float | None, typer.Option("--gb-per-s", min=0.001, help="Bandwidth of KV transfer, 10^9 bytes a second.")
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(min=1, help="Prompt tokens that one engine computes in a second.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Says instead what this machine lacks for it; exit code 1 if anything.")
    ] = False,
) -> None:
    """Prints what a configuration means: blocks, sequences at once, steps per prompt, and which budget binds.

    Starts nothing.
    """
    from cluster import plan as planning
    from cluster.config import load
    from cluster.plan_table import table
    from cluster.pool_plan import Workload

    loaded = load(config, set_ or [])
    if check:
        _check_machine(loaded)
        return
    seats = loaded.decode.engine.max_num_seqs * loaded.decode.replicas
    planned = planning.plan(
        loaded,
        Workload(prompt_tokens=prompt_tokens, output_tokens=output_tokens, num_running=running or seats),
        device_memory_bytes=planning.device_memory_bytes(loaded, device_memory_gib),
        rates=planning.Rates(gb_per_s and gb_per_s * 1e9, prefill_tokens_per_s),
    )
    if json_:
        typer.echo(json.dumps(asdict(planned)))
        return
    plain_console().print(table(planned))
    for warning in planned.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _check_machine(config: "ClusterConfig") -> None:
    from cluster.preflight import missing_for, needs_of, this_machine
    from cluster.served_model import with_dtype

    needs = needs_of(with_dtype(config))
    missing = list(missing_for(needs, this_machine(with_gpus=needs.num_gpus > 0)))
    for line in missing or ["this machine has what the deployment needs"]:
        typer.echo(line)
    if missing:
        raise typer.Exit(1)


def simulate(
    config: ConfigOption = None,
    set_: SetOption = None,
    workload: Annotated[
        str, typer.Option(help="poisson:requests=100,rate=2,prompt=256,output=64 or a file of JSON lines.")
    ] = "poisson",
    step_ms: Annotated[float, typer.Option(min=0, help="Fixed cost of a step.")] = 8.0,
    decode_ms: Annotated[float, typer.Option(min=0, help="Cost of each sequence that decodes in a step.")] = 1.1,
    prompt_token_ms: Annotated[float, typer.Option(min=0, help="Cost of each prompt token in a step.")] = 0.44,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Runs the fault schedule of this seed instead; checks every invariant."),
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Prints every event; needs --seed.")] = False,
) -> None:
    """Runs the real router, services and schedulers in virtual time.

    They serve a workload on a configuration, or go through one fault schedule.
    """
    if seed is not None:
        from simulator.seeds import show_seed

        if not show_seed(seed, typer.echo if replay else lambda line: None):
            raise typer.Exit(1)
        return
    from cluster import served_model
    from cluster import simulate as load_simulation
    from cluster.config import load

    loaded = load(config, ["runner=arithmetic", *(set_ or [])])
    served = served_model.serve_model(loaded)
    num_blocks = {name: served_model.num_blocks(loaded, pool, served) for name, pool in loaded.pools.items()}
    costs = load_simulation.StepCosts(
        step_s=step_ms / 1e3, decode_s=decode_ms / 1e3, prompt_token_s=prompt_token_ms / 1e3
    )
    planned = load_simulation.scenario(loaded, load_simulation.workload(workload), costs, num_blocks=num_blocks)
    typer.echo(json.dumps(load_simulation.simulate(planned), indent=2))


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory; without it a small model is fetched once.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Writes the same facts as JSON.")] = None,
    timings: TimingsOption = False,
) -> None:
    """One prefill engine, one decode engine and a router answer eight prompts at once."""
    from cluster.demo import run

    start_times.note_imports()
    stop = StopRequest()
    try:
        stop.listen()
        run(model, json_, timings)
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


def replay(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Configuration and requests, as JSON.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Writes the steps as JSON.")] = None,
    pretty: Annotated[bool, typer.Option(help="Prints each step for people.")] = False,
) -> None:
    """Replays a trace through the scheduler, step by step, without a model."""
    from engine.scheduler import replay as engine_replay

    try:
        loaded = json.loads(trace.read_text())
    except ValueError as error:
        raise ConfigError(f"{trace}: not JSON: {error}") from None
    loaded = loaded.get("trace", loaded)  # a recording holds a trace and the decisions on it
    if "requests" not in loaded:
        raise ConfigError(f"{trace}: not a trace: it has no requests")
    steps = engine_replay.replay(loaded)
    if out is not None:
        out.write_text(json.dumps(steps))
    if pretty:
        typer.echo(engine_replay.pretty(loaded, steps))
    elif out is None:
        typer.echo(json.dumps(steps))


def token(name: Annotated[str, typer.Argument(help="Whose it is.")]) -> None:
    """Prints a fresh bearer token, and its entry for the file that router.tokens_file names."""
    from router.accounts import new_token

    fresh, entry = new_token(name)
    console.print(f"the token, which nothing can show again: {fresh}")
    typer.echo(entry, nl=False)
