"""The copy itself, compiled so that it runs without the interpreter lock: an engine busy in Python cannot slow a
transfer.

Where numba is not installed numpy copies row by row, holding the lock between rows.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import Blocks
from protocol.arrays import Int64


def _copy_rows(destination: Blocks, source: Blocks, dst_rows: Int64, src_rows: Int64) -> None:
    """Does destination[dst_rows[i]] = source[src_rows[i]] for all i. Row numbers are not checked."""
    for i in range(len(dst_rows)):
        dst, src = dst_rows[i], src_rows[i]
        for j in range(destination.shape[1]):
            destination[dst, j] = source[src, j]


def _copy_whole_rows(destination: Blocks, source: Blocks, dst_rows: Int64, src_rows: Int64) -> None:
    """Does the same without a compiler."""
    for dst, src in zip(dst_rows.tolist(), src_rows.tolist(), strict=True):
        destination[dst] = source[src]


@cache
def _compiled() -> Callable[..., None]:
    """Loads numba when blocks are first copied: whoever only configures transfers does not wait for it."""
    if find_spec("numba") is None:
        return _copy_whole_rows
    from jit.kernel_cache import compiled_loop

    return compiled_loop((__file__,), nogil=True)(_copy_rows)


def widest(blocks: Blocks) -> npt.NDArray[np.unsignedinteger]:
    """Returns the same rows in elements of 8 bytes where they divide evenly, for speed."""
    return blocks.view(np.uint64) if blocks.shape[1] % 8 == 0 else blocks


def copy_blocks(destination: Blocks, source: Blocks, dst_blocks: Int64, src_blocks: Int64) -> None:
    """Copies whole blocks; both caches are uint8 [num_blocks, block_bytes], and ids must be in range. The first call
    compiles, which takes 0.5 s once a machine.
    """
    _compiled()(widest(destination), widest(source), dst_blocks, src_blocks)
