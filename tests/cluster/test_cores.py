"""How many cores a deployment takes, and which."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cluster import build
from cluster.config import from_tree
from cluster.cores import own_cores, usable_cores, with_threads
from tests.engine.tiny_llama import write_model_dir
from tests.hang import HANG_S

QUOTA_V2, QUOTA_V1 = "0::/system/job\n", "5:memory:/elsewhere\n2:cpu,cpuacct:/system/job\n0::/\n"


def machine(root: Path, siblings: dict[int, str], cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """/proc and /sys of a machine below `root`."""
    texts = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()}
    for name, text in {**texts, "proc/self/cgroup": cgroup, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


FOUR_THREADED = {cpu: f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
"""Four cores of two threads, numbered as Linux mostly does."""


def test_two_threads_of_one_core_are_one_core(tmp_path: Path) -> None:
    root = machine(tmp_path, FOUR_THREADED)
    assert usable_cores(root, range(8)) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert usable_cores(root, {1, 5, 6}) == [{1, 5}, {6}]
    assert usable_cores(machine(tmp_path / "ranges", dict.fromkeys(range(4), "0-3")), range(4)) == [{0, 1, 2, 3}]


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (QUOTA_V2, {"sys/fs/cgroup/system/job/cpu.max": "250000 100000\n"}, 2),
        (
            QUOTA_V2,
            {"sys/fs/cgroup/system/job/cpu.max": "max 100000\n", "sys/fs/cgroup/system/cpu.max": "3000 1000"},
            3,
        ),
        (QUOTA_V2, {"sys/fs/cgroup/system/job/cpu.max": "50000 100000\n"}, 1),
        (QUOTA_V2, {"sys/fs/cgroup/system/job/cpu.max": "900000 100000\n"}, 4),
        (QUOTA_V2, {}, 4),
        (
            QUOTA_V1,
            {
                "sys/fs/cgroup/cpu/system/job/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/system/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/system/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/system/cpu.cfs_period_us": "100000",
            },
            2,
        ),
    ],
    ids=["whole CPUs of a quota", "of the cgroup above", "at least one", "no more than there are", "none", "version 1"],
)
def test_a_quota_is_worth_so_many_cores(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert len(usable_cores(machine(tmp_path, FOUR_THREADED, cgroup, files), range(8))) == expected


def test_this_machine_has_cores() -> None:
    cores = usable_cores()
    assert cores and set().union(*cores) <= os.sched_getaffinity(0)


def test_a_machine_that_tells_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, {3, 1}) == [{1}, {3}]


@pytest.mark.parametrize(("num_cores", "prefill", "expected"), [(8, 1, 4), (2, 1, 1), (1, 3, 1), (9, 2, 3), (8, 0, 8)])
def test_engines_share_the_cores(num_cores: int, prefill: int, expected: int) -> None:
    config = from_tree({"model": "m", "prefill": {"replicas": prefill}})
    assert with_threads(config, num_cores).decode.threads == expected


def test_a_number_stays_and_engines_that_compute_elsewhere_take_one() -> None:
    config = with_threads(from_tree({"model": "m", "prefill": {"num_threads": 3}}), 8)
    assert (config.prefill.threads, config.decode.threads) == (3, 4)
    gpus = with_threads(from_tree({"model": "m", "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}), 8)
    assert (gpus.prefill.threads, gpus.decode.threads) == (1, 1)
    assert with_threads(from_tree({"runner": "arithmetic"}), 8).decode.threads == 1


def test_no_core_is_two_engines_unless_there_are_too_few() -> None:
    cores = [frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6})]
    assert own_cores([1, 2], cores) == [frozenset({0, 4}), frozenset({1, 5, 2, 6})]
    assert own_cores([2, 2], cores) == [None, None]


ENGINE = """
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from cluster.build import build_decode, on_cores
from cluster.config import from_tree
from protocol.messages import Address

pool = {"num_threads": 2, "max_model_len": 256, "num_blocks": 8}
with ExitStack() as resources:
    config = from_tree({"model": sys.argv[1], "dtype": "float32", "decode": pool, "prefill": {"replicas": 0}})
    make = partial(build_decode, config, Address("decode-0", 2), lambda envelope: None, "twopass-test-")
    on_cores(CPUS, make, resources)
print(*{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line})
"""


@pytest.mark.parametrize(
    ("cpus", "said"),
    [
        ("None", {"OMP_WAIT_POLICY = 'PASSIVE'", "OMP_PROC_BIND = 'FALSE'", "GOMP_SPINCOUNT = '0'"}),
        ("frozenset({min(os.sched_getaffinity(0))})", {"OMP_PROC_BIND = 'TRUE'", "GOMP_SPINCOUNT = '20000'"}),
    ],
    ids=["asleep", "on cores of its own"],
)
def test_an_engines_loops_are_one_pool_that_knows_how_to_wait(tmp_path: Path, cpus: str, said: set[str]) -> None:
    """libgomp says itself how its threads wait; two copies of it would be two pools, and would say it twice."""
    write_model_dir(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    engine = subprocess.run(
        [sys.executable, "-c", ENGINE.replace("CPUS", cpus), str(tmp_path)],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"}, text=True, capture_output=True, check=True, timeout=HANG_S,
    )  # fmt: skip
    assert len(engine.stdout.split()) == 1 and "libgomp" in engine.stdout
    assert {line: engine.stderr.count(line) for line in said} == dict.fromkeys(said, 1), engine.stderr


def test_a_model_is_loaded_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's team of that thread ends with it. A team of a thread that lives on keeps the step thread's from
    spinning.
    """
    seen: list[threading.Thread] = []
    monkeypatch.setattr(build, "_model_runner", lambda *arguments: seen.append(threading.current_thread()))
    config = from_tree({"model": "m", "prefill": {"replicas": 0}})
    build._cpu_runner(config, config.decode, np.zeros((2, 16), np.uint8), 0, None)
    (thread,) = seen
    assert thread is not threading.current_thread() and not thread.is_alive()
