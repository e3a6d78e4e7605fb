"""Sections that end in ways in which a section should not end, and some that say what their processes see.

`python -m tests.deploy.broken_sections` runs them and prints the outcome of each as JSON.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue

import torch

from bench.gpu.report import Column, Item, Note, NotRun, Problem, Table
from bench.gpu.run import Plan, fork, run_all
from bench.gpu.setting import VISIBLE, Setting
from protocol.errors import ConfigError


def raises(setting: Setting) -> Iterator[Item]:
    yield Note("before")
    raise KeyError("what went wrong")


def dies(setting: Setting) -> Iterator[Item]:
    """The section dies, but a process that it has started lives on and holds its pipe open."""
    yield Note("before")
    if os.fork() == 0:
        time.sleep(100)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(setting: Setting) -> Iterator[Item]:
    """The section hangs, and so does a process that it has started."""
    child = subprocess.Popen(["sleep", "100"])
    yield Note(str(child.pid))
    time.sleep(100)


def finds_a_problem(setting: Setting) -> Iterator[Item]:
    yield Problem("two and two are five")
    yield Note("after")


def cannot(setting: Setting) -> Iterator[Item]:
    raise ConfigError("no such device")
    yield NotRun("")


def measures(setting: Setting) -> Iterator[Item]:
    yield Table(
        "speeds",
        (Column("what"), Column("speed", "GB/s", measured=True), Column("peer", "GB/s", measured=True)),
        [("copy", 3.5, None)],
    )


def sees(setting: Setting) -> Iterator[Item]:
    own, theirs = os.environ[VISIBLE], fork.SimpleQueue()
    process = fork.Process(target=_tell, args=(setting, theirs))
    process.start()
    other = theirs.get()
    process.join()
    precision = torch.get_float32_matmul_precision()
    yield Note(f"this process and one of its own see {own} and {other}, float32 products are {precision}")


def _tell(setting: Setting, name: "SimpleQueue[str]") -> None:
    setting.see_only(1)
    name.put(os.environ[VISIBLE])


def plan(seconds: float = 30.0, function: str = "", module: str = __name__, num_gpus: int | None = 1) -> Plan:
    return Plan(function or module, module, seconds, function or "run", num_gpus=num_gpus)


PLANS = [
    plan(function="raises"),
    plan(function="dies"),
    plan(function="hangs", seconds=1.0),
    plan(function="finds_a_problem"),
    plan(function="cannot"),
    plan(module="tests.deploy.no_such_section"),
    plan(function="measures"),
    plan(function="sees"),
    plan(function="sees", num_gpus=None),
    plan(function="sees", num_gpus=3),
]

if __name__ == "__main__":
    os.environ[VISIBLE] = "GPU-a,GPU-b"
    torch.set_float32_matmul_precision("high")  # as an image may have done
    setting = Setting(rehearsal=False, seed=1, gpus=("GPU-a", "GPU-b"))
    sections = [*run_all(PLANS, setting, 100.0), *run_all(PLANS[:1], setting, 0.0)]
    print(json.dumps([section.as_json() | {"text": section.as_text()} for section in sections]))
