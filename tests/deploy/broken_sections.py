"""Sections that end in ways in which a section should not end.

`python -m tests.deploy.broken_sections` runs them and prints the outcome of each as JSON.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from bench.gpu.report import Column, Item, Note, NotRun, Problem, Table
from bench.gpu.run import Plan, run_all
from bench.gpu.setting import Setting
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


def plan(seconds: float = 30.0, function: str = "", module: str = __name__) -> Plan:
    return Plan(function or module, module, seconds, function or "run")


PLANS = [
    plan(function="raises"),
    plan(function="dies"),
    plan(function="hangs", seconds=1.0),
    plan(function="finds_a_problem"),
    plan(function="cannot"),
    plan(module="tests.deploy.no_such_section"),
    plan(function="measures"),
]

if __name__ == "__main__":
    setting = Setting(rehearsal=False, seed=1)
    sections = [*run_all(PLANS, setting, 100.0), *run_all(PLANS[:1], setting, 0.0)]
    print(json.dumps([section.as_json() | {"text": section.as_text()} for section in sections]))
