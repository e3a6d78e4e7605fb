"""What every transport does with the block ids of a pull before it moves a byte."""

from collections.abc import Sequence

import numpy as np

from protocol.arrays import Int64
from protocol.errors import PullFailed


def checked_pairs(
    src_blocks: Sequence[int], num_src_blocks: int, dst_blocks: Sequence[int], num_dst_blocks: int
) -> tuple[Int64, Int64]:
    """Returns both as int64 [n]. Raises PullFailed for ids outside their cache and for lists of unequal length."""
    src, dst = _checked(src_blocks, num_src_blocks, "there"), _checked(dst_blocks, num_dst_blocks, "here")
    if len(src) != len(dst):
        raise PullFailed(f"{len(src)} blocks there for {len(dst)} here")
    return src, dst


def _checked(blocks: Sequence[int], num_blocks: int, where: str) -> Int64:
    ids = np.asarray(blocks, np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
        raise PullFailed(f"block {ids.max() if ids.min() >= 0 else ids.min()} {where} is outside 0 .. {num_blocks - 1}")
    return ids
