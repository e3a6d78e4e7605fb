"""The threads of parallel loops. numba's and torch's are one pool, and wait asleep unless they have cores of their own
(own_cores.py).

Both use libgomp, but under two file names: only where numba's is loaded first does torch find it there. Otherwise the
process has two libraries, and twice as many threads as cores. libgomp reads how threads wait when it is loaded. By
default they spin, which costs a neighbour its core: with three busy processes on two cores, a decode of 8 sequences
took 72 to 262 ms spinning and 30 to 52 ms asleep.

Import this module before torch.
"""

import importlib
import os

if "OMP_PROC_BIND" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _load() -> bool:
    try:
        numba = importlib.import_module("numba")
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    numba.config.THREADING_LAYER = "omp"
    return True


PARALLEL = _load()
"""Loops run in parallel only on OpenMP. numba's own pool would compete with torch's for the cores."""
