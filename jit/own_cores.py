"""How OpenMP's threads behave in a process that has cores of its own: each stays on one, and spins for a moment.

A decode step has hundreds of short loops. A thread that sleeps between them wakes too late to be of use; one that spins
and may move ends up on its neighbour's core, where each waits for the other's time slice. Decode of 1 / 8 / 32
sequences on two cores, ms (Zen 5, AVX-512): asleep 12.9 / 19.7 / 47.4; kept on their cores and spinning this long 7.6 /
9.9 / 20.6, and with a busy neighbour on one of the cores 16.1 / 25.7 / 53.0 (asleep: 10.9 / 15.9 / 37.7).
"""

import os

SPINS = 20_000
"""libgomp's turns of a waiting loop, well below a millisecond: longer than the pause between two loops of a step, and
next to nothing between two steps.
"""


def prepare() -> None:
    """Before `jit.openmp` is imported, in a process that may use cores which no other engine uses. What the environment
    says already counts.
    """
    for name, value in (("OMP_PROC_BIND", "true"), ("OMP_PLACES", "cores"), ("GOMP_SPINCOUNT", str(SPINS))):
        os.environ.setdefault(name, value)
