"""GPU machines may have torch and numpy alone; machines without a GPU not even those libraries that only GPUs need."""

import subprocess
import sys

from tests.hang import HANG_S
from tests.kv_transfer.processes import ROOT

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(["numba", "torch", "triton", "nixl", "pynvml"])
import kv_transfer
for module in pkgutil.walk_packages(kv_transfer.__path__, "kv_transfer."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_every_module_imports_without_what_is_optional() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert {"kv_transfer.device.cuda_driver", "kv_transfer.transports.nixl", "kv_transfer.select"} <= set(
        done.stdout.split()
    )
