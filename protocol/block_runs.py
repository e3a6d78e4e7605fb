"""Neighbouring blocks, which are copied as one piece."""

import numpy as np

from protocol.arrays import Int64


def merged_runs(src: Int64, dst: Int64) -> Int64:
    """Returns int64 [num_runs, 3]: first source block, first destination block, number of blocks. A run ascends by one
    on both sides, and runs ascend by source. The pairs may come in any order: freed blocks are often given out again
    from the last one to the first.
    """
    if not len(src):
        return np.zeros((0, 3), np.int64)
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    return np.stack((src[starts], dst[starts], np.diff(np.append(starts, len(src)))), axis=1)
