"""The copy itself, compiled so that it runs without the interpreter lock: an engine busy in Python cannot slow a
transfer.

Where numba is not installed numpy copies row by row, holding the lock between rows.
"""

import numpy as np
import numpy.typing as npt

from jit.loops_compile import compiled_loop
from kv_transfer.block_span import BlockSpan
from kv_transfer.layout import Blocks
from protocol.arrays import Int64

SOURCES = (__file__,)

Elements = npt.NDArray[np.unsignedinteger]
"""Rows of a cache in elements of 1 or 8 bytes."""


def _by_numpy(
    destination: Elements,
    source: Elements,
    dst_rows: Int64,
    src_rows: Int64,
    dst_from: np.uint64,
    src_from: np.uint64,
    length: np.uint64,
) -> None:
    dst_part, src_part = slice(dst_from, dst_from + length), slice(src_from, src_from + length)
    for dst, src in zip(dst_rows.tolist(), src_rows.tolist(), strict=True):
        destination[dst, dst_part] = source[src, src_part]


@compiled_loop(SOURCES, nogil=True, uncompiled=_by_numpy)
def _copy_rows(
    destination: Elements,
    source: Elements,
    dst_rows: Int64,
    src_rows: Int64,
    dst_from: np.uint64,
    src_from: np.uint64,
    length: np.uint64,
) -> None:
    """Copies `length` elements of each row src_rows[i] to row dst_rows[i], without any check. The last three numbers
    are unsigned: with offsets that might be negative the copy would be several times as slow.
    """
    for i in range(len(dst_rows)):
        dst, src = dst_rows[i], src_rows[i]
        for j in range(length):
            destination[dst, dst_from + j] = source[src, src_from + j]


def copy_blocks(destination: Blocks, source: Blocks, dst_blocks: Int64, src_blocks: Int64, span: BlockSpan) -> None:
    """Copies a span of blocks between caches, uint8 [num_blocks, block_bytes] each. Ids must be in range, the span
    within both. Where everything divides by 8, elements of 8 bytes are copied, for speed. The first call for each size
    of elements compiles, which takes 0.5 s once a machine.
    """
    numbers = (span.dst_offset, span.src_offset, span.length)
    divide = all(number % 8 == 0 for number in (*numbers, destination.shape[1], source.shape[1]))
    element, size = (np.uint64, 8) if divide else (np.uint8, 1)
    dst_from, src_from, length = (np.uint64(number // size) for number in numbers)
    _copy_rows(destination.view(element), source.view(element), dst_blocks, src_blocks, dst_from, src_from, length)
