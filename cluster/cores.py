"""The cores of this machine that a deployment may use, and how its engines share them.

An engine computes with one thread per physical core: two threads of one core share its multipliers. It may use what
this process may: its affinity, and the CPU quotas of its cgroup and of those above.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from cluster.config import ClusterConfig, PoolConfig

Core = frozenset[int]
"""The logical CPUs of one physical core, as far as the process may use them."""


def usable_cores(root: Path = Path("/"), affinity: Collection[int] | None = None) -> list[Core]:
    """The physical cores that this process may use, by their first logical CPU; no more than its quota is worth, and at
    least one. `root` is where /proc and /sys are; `affinity` are the logical CPUs allowed, by default the process's.
    """
    allowed = os.sched_getaffinity(0) if affinity is None else affinity
    cores = sorted({_siblings(root, cpu).intersection(allowed) | {cpu} for cpu in allowed}, key=min)
    quota = min(_quotas(root), default=float(len(cores)))
    return cores[: max(1, int(quota))]


def with_threads(config: ClusterConfig, num_cores: int) -> ClusterConfig:
    """The configuration with a number wherever `num_threads` is auto: an equal share of the cores for each engine that
    computes on the CPU, one thread for others.
    """
    num_engines = sum(pool.replicas for pool in config.pools.values() if _computes_here(config, pool))
    share = max(1, num_cores // max(1, num_engines))

    def counted(pool: PoolConfig) -> PoolConfig:
        if pool.num_threads != "auto":
            return pool
        return replace(pool, num_threads=share if _computes_here(config, pool) else 1)

    return replace(config, prefill=counted(config.prefill), decode=counted(config.decode))


def own_cores(num_threads: Sequence[int], cores: Sequence[Core]) -> list[Core | None]:
    """Logical CPUs for engines of so many threads, no core for two of them. None for all where the cores do not
    suffice: the kernel shares them better.
    """
    if sum(num_threads) > len(cores):
        return [None] * len(num_threads)
    left = iter(cores)
    return [frozenset[int]().union(*(next(left) for _ in range(threads))) for threads in num_threads]


def _computes_here(config: ClusterConfig, pool: PoolConfig) -> bool:
    return config.runner == "torch" and config.device_of(pool) == "cpu"


def _siblings(root: Path, cpu: int) -> Core:
    try:
        text = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset((cpu,))
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return frozenset(n for first, _, last in ranges for n in range(int(first), int(last or first) + 1))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time per second that the process's cgroups grant, those that limit it.

    cgroup v2: `cpu.max`, "quota period" or "max period"; v1: `cpu.cfs_quota_us`, -1 for none. See cgroups(7).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, inside = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup"), PurePosixPath(path)
        for folder in (inside, *inside.parents):
            here = mount / str(folder).lstrip("/")
            try:
                if controllers:
                    quota, period = ((here / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (here / "cpu.max").read_text().split()
            except OSError:
                continue
            if quota.strip() not in ("max", "-1"):
                yield int(quota) / int(period)
