"""Finds what a machine lacks for a deployment before anything is launched, and names a remedy for each thing.

An engine on a GPU would fail by itself, but only after the weights are loaded, and with an error of the compiler or the
driver.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import StartupError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

SHARED_MEMORY = Path("/dev/shm")
ASK_S = 30.0
"""Longest wait for the process that asks the driver."""

_ASK_DRIVER = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def ask(name, *given):
    value = ctypes.c_int()
    error = getattr(cuda, name)(ctypes.byref(value), *given)
    if error:
        raise SystemExit(f"{name} fails with error {error}")
    return value.value
version = ask("cuDriverGetVersion")
if error := cuda.cuInit(0):
    raise SystemExit(f"cuInit fails with error {error}")
count = ask("cuDeviceGetCount")
def name(device):
    content = ctypes.create_string_buffer(16)
    if error := cuda.cuDeviceGetUuid(content, device):
        raise SystemExit(f"cuDeviceGetUuid fails with error {error}")
    return f"GPU-{uuid.UUID(bytes=content.raw)}"
peers = [[a == b or bool(ask("cuDeviceCanAccessPeer", a, b)) for b in range(count)] for a in range(count)]
print(json.dumps([version, [name(device) for device in range(count)], peers]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the CUDA driver reports."""

    version: int
    """The newest CUDA that it runs, as 1000 major + 10 minor."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that this process is shown, in CUDA's order. CUDA_VISIBLE_DEVICES and `nvidia-smi -i` take
    them.
    """
    peers: tuple[tuple[bool, ...], ...]
    """`peers[a][b]` says whether GPU a can read the memory of GPU b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a machine that decide whether engines can run on it."""

    compiler: str | None
    """Path of a C compiler."""
    has_python_h: bool
    has_triton: bool
    torch_cuda: tuple[int, int] | None
    """The CUDA version (major, minor) that torch was built for. None: torch is a CPU build or is not installed."""
    driver: Driver | str
    """The driver's report, or why there is none."""
    shared_memory_bytes: int
    """Free bytes in /dev/shm."""


def this_machine(*, with_gpus: bool) -> Machine:
    """Examines this machine. The driver is asked only if `with_gpus`, and in a process of its own: a process that has
    initialised CUDA cannot fork one that uses a GPU.
    """
    return Machine(
        compiler=next((path for name in _compilers() if (path := shutil.which(name))), None),
        has_python_h=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        has_triton=find_spec("triton") is not None,
        torch_cuda=_torch_cuda(),
        driver=_ask_driver() if with_gpus else "not asked",
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What all engines of a deployment need together."""

    num_gpus: int
    transport: str
    """The value of `transfer.transport`."""
    shared_memory_bytes: int


def needs_of(config: "ClusterConfig") -> Needs:
    """What the deployment needs. A prefill engine on a CPU has its whole cache in shared memory. One on a GPU has only
    little more than its lease words there, which are not counted. Raises ModelError if the size of a cache depends on a
    model that cannot be read.
    """
    # The GPU check imports this module without reading a configuration.
    from cluster.served_model import num_blocks, serve_model

    pool, cache_bytes = config.prefill, 0
    if pool.replicas and config.device_of(pool) == "cpu":
        served = serve_model(config)
        cache_bytes = num_blocks(config, pool, served) * served.layout(pool).block_bytes
    return Needs(
        num_gpus=sum(pool.replicas * pool.num_gpus for pool in config.pools.values()),
        transport=config.transfer.transport,
        shared_memory_bytes=pool.replicas * cache_bytes,
    )


def check(needs: Needs, machine: Machine) -> None:
    """Raises a StartupError that names everything that is missing, or returns."""
    if missing := list(missing_for(needs, machine)):
        raise StartupError("\n  ".join(["this machine cannot run the deployment:", *missing]))


def missing_for(needs: Needs, machine: Machine) -> Iterator[str]:
    """Yields one line for each thing that is missing, with its remedy."""
    if machine.shared_memory_bytes < needs.shared_memory_bytes:
        yield (
            f"/dev/shm: {needs.shared_memory_bytes} bytes of shared memory needed for the KV caches, "
            f"{machine.shared_memory_bytes} available: a container takes --shm-size, a pod an emptyDir of medium Memory"
        )
    if not needs.num_gpus:
        return
    if machine.compiler is None:
        yield "C compiler: none in PATH, Triton builds its launcher with one: apt install gcc, or set CC"
    if not machine.has_python_h:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield f"Python.h: not there, Triton's launcher includes it: apt install python{version}-dev"
    if not machine.has_triton:
        yield "Triton: not installed: pip install 'twopass[gpu]'"
    if machine.torch_cuda is None:
        yield "torch: not a CUDA build: pip install torch from https://download.pytorch.org/whl/ for your CUDA"
    if isinstance(machine.driver, str):
        yield f"driver: {machine.driver}: install NVIDIA's, or start the container with --gpus all"
        return
    yield from _of_driver(needs, machine.driver, machine.torch_cuda)


def _of_driver(needs: Needs, driver: Driver, torch_cuda: tuple[int, int] | None) -> Iterator[str]:
    """Yields what is missing in the driver's report. A driver runs no CUDA of a newer major version than its own."""
    major, minor = driver.version // 1000, driver.version % 1000 // 10
    if torch_cuda is not None and torch_cuda[0] > major:
        yield (
            f"driver: it runs CUDA {major}.{minor}, torch was built for {torch_cuda[0]}.{torch_cuda[1]}: install a "
            f"newer driver, or a torch for CUDA {major}"
        )
    if len(driver.gpus) < needs.num_gpus:
        yield (
            f"num_gpus: the engines take {needs.num_gpus} GPUs, the driver shows {len(driver.gpus)}: fewer replicas, "
            "or more in CUDA_VISIBLE_DEVICES"
        )
    elif needs.transport == "cuda_ipc" and not all(all(row) for row in driver.peers):
        yield (
            "transfer.transport: cuda_ipc needs GPUs that read each other's memory, some here do not: auto or "
            "host_staged goes through host memory"
        )


def _compilers() -> list[str]:
    """Names of C compilers, in the order in which Triton looks for one."""
    return [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]


def _torch_cuda() -> tuple[int, int] | None:
    """Reads torch's version file, because importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*'(\d+)\.(\d+)", file.read_text(), re.MULTILINE) if file.exists() else None
    return (int(found[1]), int(found[2])) if found else None


def _ask_driver() -> Driver | str:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except subprocess.TimeoutExpired:
        return f"it has not answered for {ASK_S:g} s"
    except subprocess.CalledProcessError as error:
        return (str(error.stderr).strip().splitlines() or [f"asking it ended with exit code {error.returncode}"])[-1]
    version, gpus, peers = json.loads(asked.stdout)
    return Driver(version=version, gpus=tuple(gpus), peers=tuple(tuple(row) for row in peers))
