"""Tests that everything a machine lacks is named before the first launch, with a remedy."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import preflight
from cluster.config import load
from cluster.preflight import Driver, Machine, Needs, check, missing_for, needs_of, this_machine
from protocol.errors import StartupError

ROOT = Path(__file__).parents[2]
PEERS = ((True, True), (True, True))
NODE = Machine(
    compiler="/usr/bin/gcc",
    has_python_h=True,
    has_triton=True,
    torch_cuda=(12, 8),
    driver=Driver(version=12040, gpus=("GPU-a", "GPU-b"), peers=PEERS),
    shared_memory_bytes=1 << 30,
)
NEEDS = Needs(num_gpus=2, transport="auto", shared_memory_bytes=1 << 20)


def test_a_machine_with_everything_lacks_nothing() -> None:
    assert list(missing_for(NEEDS, NODE)) == []
    check(NEEDS, NODE)


@pytest.mark.parametrize(
    ("machine", "named", "remedy"),
    [
        ({"compiler": None}, "C compiler: none", "apt install gcc"),
        ({"has_python_h": False}, "Python.h", r"apt install python3\.\d+-dev"),
        ({"has_triton": False}, "Triton", r"twopass\[gpu\]"),
        ({"torch_cuda": None}, "torch: not a CUDA build", "pip install torch"),
        ({"torch_cuda": (13, 0)}, r"driver: it runs CUDA 12\.4, torch was built for 13\.0", "newer driver"),
        ({"driver": "cuInit fails with error 100"}, "driver: cuInit fails with error 100", "--gpus all"),
        (
            {"driver": Driver(version=12040, gpus=("GPU-a",), peers=((True,),))},
            "num_gpus: the engines take 2 GPUs, the driver shows 1",
            "CUDA_VISIBLE_DEVICES",
        ),
        ({"shared_memory_bytes": 64}, r"/dev/shm: 1048576 bytes .* needed .* 64 available", "--shm-size"),
    ],
)
def test_each_missing_thing_is_named_with_its_remedy(machine: dict[str, Any], named: str, remedy: str) -> None:
    (line,) = missing_for(NEEDS, replace(NODE, **machine))
    with pytest.raises(StartupError, match=f"{named}.*{remedy}"):
        check(NEEDS, replace(NODE, **machine))
    assert line.count("\n") == 0


def test_peer_access_is_asked_for_only_where_a_transport_is_to_use_it() -> None:
    apart = replace(NODE, driver=Driver(version=12040, gpus=("GPU-a", "GPU-b"), peers=((True, False), (False, True))))
    assert list(missing_for(NEEDS, apart)) == []
    (line,) = missing_for(replace(NEEDS, transport="cuda_ipc"), apart)
    assert line.startswith("transfer.transport: cuda_ipc") and "host_staged" in line


def test_everything_that_is_missing_is_said_at_once() -> None:
    bare = replace(NODE, compiler=None, has_python_h=False, driver="libcuda.so.1: cannot open shared object file")
    with pytest.raises(StartupError) as caught:
        check(NEEDS, bare)
    assert len(str(caught.value).splitlines()) == 4


def test_engines_without_a_gpu_need_none_of_that() -> None:
    machine = this_machine(with_gpus=False)
    assert machine.driver == "not asked"
    without = replace(machine, compiler=None, has_python_h=False, has_triton=False, torch_cuda=None)
    assert list(missing_for(replace(NEEDS, num_gpus=0), without)) == []


def test_the_driver_is_asked_in_a_process_of_its_own() -> None:
    driver = this_machine(with_gpus=True).driver
    if isinstance(driver, str):
        assert "libcuda" in driver or "cuInit" in driver
    else:
        assert len(driver.gpus) == len(driver.peers)


LIBRARY = r"""
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * i + device;
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device < peer; return 0; }
"""


def test_gpus_are_told_by_the_names_that_other_tools_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library stands for a driver with two GPUs, of which the first reads the second."""
    if (compiler := this_machine(with_gpus=False).compiler) is None:
        pytest.skip("no C compiler")
    source = tmp_path / "driver.c"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert this_machine(with_gpus=True).driver == Driver(
        version=12080,
        gpus=("GPU-00102030-4050-6070-8090-a0b0c0d0e0f0", "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1"),
        peers=((True, True), (False, True)),
    )


def test_what_a_deployment_needs_follows_from_its_configuration() -> None:
    one, three = (
        needs_of(load(None, ["runner=arithmetic", "prefill.num_blocks=64", f"prefill.replicas={num}"]))
        for num in (1, 3)
    )
    assert (one.num_gpus, three.shared_memory_bytes) == (0, 3 * one.shared_memory_bytes)
    assert one.shared_memory_bytes % 64 == 0 and one.shared_memory_bytes > 0
    assert needs_of(load(None, ["runner=arithmetic", "prefill.replicas=0"])).shared_memory_bytes == 0
    node = needs_of(load(ROOT / "deploy" / "4xh100.yaml", ["transfer.transport=cuda_ipc"]))
    assert (node.num_gpus, node.transport, node.shared_memory_bytes) == (4, "cuda_ipc", 0)


def test_a_driver_that_kills_who_asks_and_a_machine_without_shared_memory_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_ASK_DRIVER", "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(preflight, "SHARED_MEMORY", Path("/nowhere/shm"))
    machine = this_machine(with_gpus=True)
    assert (machine.driver, machine.shared_memory_bytes) == ("asking it ended with exit code -9", 0)
