"""Every kernel, compiled for Hopper and Ampere at production shapes without a GPU: registers, spills, shared memory,
tensor cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernels.aot_cases import cases_of
from tests.engine.kernels.compile_ahead import Compiled

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of one thread block. An
# SM has 1 KB more, and keeps 1 KB for itself for every block.
SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[Compiled]:
    """Compiled in a process of its own, because this one interprets; kept in pytest's cache folder from run to run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.compile_ahead", *map(str, SHARED_BYTES)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [Compiled(**fields) for fields in json.loads(done.stdout)]


def test_kernels_fit_their_gpu(compiled: list[Compiled]) -> None:
    print(f"\n{'case':<44} {'kernel':<28} sm registers stack shared warps tensor cores")
    for each in compiled:
        print(
            f"{each.case:<44} {each.kernel:<28} {each.arch} {each.registers:>9} {each.stack_bytes:>5} "
            f"{each.shared_bytes:>6}"
            f" {each.num_warps:>5} {'yes' if each.tensor_cores else '-'}"
        )
    assert {(each.case, each.arch) for each in compiled} == {
        (case, arch) for arch in SHARED_BYTES for case in cases_of(arch)
    }
    for each in compiled:
        assert each.stack_bytes == 0, f"{each.case}: registers spill on sm_{each.arch}"
        attends = each.kernel.startswith("attention")
        programs = 2 if attends and each.num_warps == 4 and each.arch == 90 else 1  # as work lists count on there
        assert each.registers <= 255 and programs * each.registers * each.num_warps * 32 <= 65536, each
        assert programs * (each.shared_bytes + 1024) <= SHARED_BYTES[each.arch] + 1024, each
        assert each.tensor_cores or not attends or "float32" in each.case, each
