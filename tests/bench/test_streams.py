"""The load of many streams runs, and its verdict is right."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from bench.streams import MAX_GROWTH_BYTES, Report
from tests.hang import HANG_S

GOOD = Report(2, 1.0, {"gRPC complete": 5}, [], 2, 0, 10**8, 10**8 + MAX_GROWTH_BYTES)


def test_the_verdict() -> None:
    assert GOOD.problems() == []
    bad = replace(GOOD, failures=["HTTP: x"], open_at_the_end=1, most_bytes=10**8 + MAX_GROWTH_BYTES + 2**20)
    assert bad.problems() == [
        "failed: HTTP: x",
        "1 requests are still open",
        "grown by 17.0 MiB, at most 16 are allowed",
    ]


def test_two_seconds() -> None:
    command = [sys.executable, "-m", "bench.streams", "--streams", "40", "--seconds", "2", "--step-s", "0.02"]
    done = subprocess.run(
        [*command, "--json"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG_S
    )
    report = json.loads(done.stdout)
    assert not report["failures"] and not report["open_at_the_end"], done.stderr
    assert {end.split()[0] for end in report["ends"]} == {"HTTP", "gRPC"}
