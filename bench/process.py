"""What a process holds and has used, and what it runs on."""

import os
from pathlib import Path


def memory_bytes(pid: int) -> int:
    """Resident anonymous memory. Shared memory and mapped files do not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def cpu_s(pid: int) -> float:
    """CPU time of all its threads, in the kernel's ticks of mostly 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_kind() -> str:
    """The CPU's model, and the widest of the instructions that kernels here are made for."""
    parts = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in parts}
    flags = facts.get("flags", "").split()
    widest = next((flag for flag in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if flag in flags), "no AVX2")
    return f"{facts.get('model name', 'a CPU without a name')}, {widest}"
