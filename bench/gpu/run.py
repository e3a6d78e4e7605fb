"""Runs the sections one after the other, each in a process of its own, and reports. `deploy/gpu_check.py` starts it.

1. This process imports torch but never touches the device. Every section is a fork of it with a CUDA context of its
   own.
2. A section sends each finding at once. If it crashes or exceeds its time limit, what it has sent before is kept.
3. The process group of a section is killed at its end, so no engine that it has started is left.
4. The most important sections come first. A section for which no time is left is not run, and the report says so.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu import clocks
from bench.gpu.report import Item, NotRun, Problem, Section
from bench.gpu.setting import FAKE_GPUS, GPU_TRANSPORTS, ROOT, SHARED_MEMORY, Setting
from cluster.preflight import this_machine
from kv_transfer.segment import PREFIX, remove_stale
from protocol.errors import ConfigError

TOTAL_S = 570.0
COMPILING_S = 180.0
"""For a section that compiles kernels for a GPU on which nothing was compiled before."""
MIN_SECTION_S = 5.0

fork = multiprocessing.get_context("fork")


class Plan(NamedTuple):
    name: str
    module: str
    """Imported in the section's own process, so that an import error fails only this section."""
    limit_s: float
    function: str = "run"
    arguments: tuple[str | int, ...] = ()
    """Arguments of the function after the setting."""
    num_gpus: int | None = 1
    """How many GPUs its processes see, one each. None: its process sees all, as this one does."""
    timed: bool = False
    """Whether clocks and power are read before it and after it."""


PLACES = (("", 0), (", two GPUs", 1))
"""On which GPU the exporting process runs. The importing one is on GPU 0."""
BESIDE = "bench.gpu.decode_beside_pulls"
SECTIONS = (
    Plan("environment", "bench.gpu.environment", 60.0, timed=True),
    Plan("preflight", "bench.gpu.preflight", 40.0, num_gpus=None),
    Plan("kernel errors", "bench.gpu.kernel_errors", COMPILING_S),
    Plan("tokens", "bench.gpu.tokens", COMPILING_S),
    *(Plan(f"pair{place}", "bench.gpu.pair", COMPILING_S, arguments=(gpu,), num_gpus=1 + gpu) for place, gpu in PLACES),
    *(
        Plan(
            f"exporter death, {kind}{place}", "bench.gpu.exporter_death", 90.0, arguments=(kind, gpu), num_gpus=1 + gpu
        )
        for place, gpu in PLACES
        for kind in GPU_TRANSPORTS
    ),
    Plan("head", "bench.gpu.head", 60.0, timed=True),
    Plan("kernel times", "bench.gpu.kernel_times", COMPILING_S, timed=True),
    Plan("step times", "bench.gpu.step_times", COMPILING_S, timed=True),
    Plan("scheduler share", "bench.gpu.scheduler_share", COMPILING_S, timed=True),
    Plan("pool size", "bench.gpu.pool_size", COMPILING_S),
    *(
        Plan(f"transfer{place}", "bench.gpu.transfer", 60.0, arguments=(gpu,), num_gpus=1 + gpu, timed=True)
        for place, gpu in PLACES
    ),
    *(
        Plan(f"decode beside pulls{place}", BESIDE, 60.0, arguments=(gpu,), num_gpus=1 + gpu, timed=True)
        for place, gpu in PLACES
    ),
    Plan("layouts", "bench.gpu.layouts", 60.0, timed=True),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Correctness and speed of kernels, runner and transports on one NVIDIA GPU."
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="no GPU: interpreted kernels, smallest shapes, no figures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="SmolLM2-135M-Instruct, to compare with its golden tokens"
    )
    parser.add_argument("--seed", type=int, help="of all random inputs; drawn if it is not given")
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_S,
        help="after which a section that still runs is stopped, and none begins (default %(default)g)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[plan.name for plan in SECTIONS], help="these sections"
    )
    return parser


def _gpus(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """What this run is shown. Ends the process where that is nothing."""
    driver = this_machine(with_gpus=True).driver  # another process asks: one that has called CUDA cannot be forked
    if isinstance(driver, str) or not driver.gpus:
        why = driver if isinstance(driver, str) else "the driver shows none"
        parser.exit(2, f"no GPU here: {why}; `--rehearse` walks the same path without one\n")
    return driver.gpus


def main() -> int:
    """Returns the exit status: 0 if no section failed, 1 if one did, 2 if there is no GPU."""
    parser = _parser()
    arguments = parser.parse_args()
    gpus = FAKE_GPUS if arguments.rehearse else _gpus(parser)
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    setting = Setting(rehearsal=arguments.rehearse, seed=seed, model_dir=arguments.model, gpus=gpus)
    head = {
        "rehearsal": setting.rehearsal,
        "seed": seed,
        "gpus": len(gpus),
        "git_commit": _git_commit(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    print(" ".join(f"{name}={value}" for name, value in head.items()), flush=True)
    plans = [plan for plan in SECTIONS if arguments.only is None or plan.name in arguments.only]
    sections: list[Section] = []
    for section in run_all(plans, setting, arguments.seconds):
        print(f"\n{section.as_text()}", flush=True)
        sections.append(section)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(_report(head, sections), indent=1) + "\n")
    print(
        "\n"
        + "\n".join(
            f"{section.status:8} {section.name}{': ' + section.why if section.why else ''}" for section in sections
        )
    )
    return int(any(section.status == "failed" for section in sections))


def run_all(plans: list[Plan], setting: Setting, total_s: float) -> Iterator[Section]:
    until = time.monotonic() + total_s
    for plan in plans:
        left = until - time.monotonic()
        if plan.num_gpus is not None and plan.num_gpus > len(setting.gpus):
            yield _not_run(plan, setting, f"it takes {plan.num_gpus} GPUs, this run is shown {len(setting.gpus)}")
        elif left < MIN_SECTION_S:
            yield _not_run(plan, setting, f"the {total_s:g} s of the whole run are used up")
        else:
            yield run_section(plan, setting, min(plan.limit_s, left))


def _not_run(plan: Plan, setting: Setting, why: str) -> Section:
    return Section(plan.name, rehearsal=setting.rehearsal, status="not run", why=why)


def run_section(plan: Plan, setting: Setting, limit_s: float) -> Section:
    section = Section(plan.name, rehearsal=setting.rehearsal)
    before = _clocks(plan, setting)
    started = time.monotonic()
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(plan, setting, sender))
    with warnings.catch_warnings():
        # Python warns of forks beside threads. Those of numpy only wait for work, and survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        for item in _items(receiver, process, limit_s):
            section.take(item)
        section.seconds = time.monotonic() - started
        for item in clocks.compared(before, _clocks(plan, setting)):
            section.take(item)
    finally:
        _kill_group(process.pid)
        process.join()
        receiver.close()
        remove_stale(f"{PREFIX}{SHARED_MEMORY}")
    return section


def _clocks(plan: Plan, setting: Setting) -> list[clocks.Reading]:
    """Of the GPUs that the section computes on. At its end its process still exists, so they have not gone idle."""
    return [clocks.read(gpu, setting) for gpu in setting.gpus[: plan.num_gpus]] if plan.timed else []


def _items(receiver: "Connection[Any, Any]", process: ForkProcess, limit_s: float) -> Iterator[Item]:
    """Yields what the section sends. If it does not end as it should, the last item is a problem that says why."""
    until = time.monotonic() + limit_s
    assert process.pid is not None
    death = os.pidfd_open(process.pid)  # its engines keep its pipe and its sentinel open
    try:
        while ready := wait([receiver, death], max(0.0, until - time.monotonic())):
            try:
                if receiver not in ready:
                    raise EOFError
                item = receiver.recv()
            except EOFError:
                process.join()
                yield Problem(f"its process ended with exit code {process.exitcode}")
                return
            if item is None:
                return
            yield item
        yield Problem(f"stopped after {limit_s:.0f} s")
    finally:
        os.close(death)


def _work(plan: Plan, setting: Setting, sender: "Connection[Any, Any]") -> None:
    """Sends every item, then None. If an exception ends the section early, it is sent as the last problem."""
    os.setsid()
    if plan.num_gpus is not None:
        setting.see_only(0)
    # An image may have turned TF32 on by an environment variable, and then float32 would be no reference.
    torch.set_float32_matmul_precision("highest")
    try:
        for item in getattr(import_module(plan.module), plan.function)(setting, *plan.arguments):
            sender.send(item)
    except ConfigError as error:
        sender.send(NotRun(str(error)))
    finally:
        if (failure := sys.exception()) is not None:
            sender.send(Problem("".join(traceback.format_exception_only(failure)).strip()))
        sender.send(None)


def _kill_group(pid: int | None) -> None:
    """Kills the process group of a section: the section itself and all that it has started."""
    if pid is not None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _report(head: dict[str, Any], sections: list[Section]) -> dict[str, Any]:
    facts = {name: value for section in sections for name, value in section.facts.items()}
    return head | {"machine": facts, "sections": [section.as_json() for section in sections]}
