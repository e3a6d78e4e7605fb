"""The soak test runs, and its verdict is right."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from bench.soak import MAX_GROWTH_BYTES, Capacity, Report
from tests.hang import HANG_S

START = Capacity(
    free_blocks={"prefill-0": 99, "decode-0": 99},
    memory_bytes={"router": 10**8, "prefill-0": 10**8, "decode-0": 10**8},
    pids={"router": 1, "prefill-0": 2, "decode-0": 3},
)


def problems(end: Capacity) -> list[str]:
    return Report(1.0, START, end, {}).problems()


def test_what_is_back_is_no_problem() -> None:
    assert problems(replace(START, memory_bytes={name: 10**8 + MAX_GROWTH_BYTES for name in START.memory_bytes})) == []


def test_a_lost_block_much_memory_and_a_death_are_problems() -> None:
    assert problems(replace(START, free_blocks={"prefill-0": 98, "decode-0": 99})) == [
        "prefill-0 has 98 free blocks, 99 before"
    ]
    assert problems(replace(START, free_blocks={"decode-0": 99})) == ["prefill-0 has None free blocks, 99 before"]
    grown = START.memory_bytes | {"router": 10**8 + MAX_GROWTH_BYTES + 2**20}
    assert problems(replace(START, memory_bytes=grown)) == ["router has grown by 33.0 MiB, at most 32 are allowed"]
    assert problems(replace(START, pids=START.pids | {"decode-0": 4})) == ["decode-0 has died"]


def test_a_fifth_of_a_minute() -> None:
    command = [sys.executable, "-m", "bench.soak", "--minutes", "0.2", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["answers"]) == {"complete", "cancelled"}
    assert report["start"]["free_blocks"] == report["end"]["free_blocks"] == {"prefill-0": 2047, "decode-0": 2047}
