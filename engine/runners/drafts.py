"""Which drafts stand: the rule that makes speculation change nothing but the number of steps."""

from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.integer[Any]]
Int64 = npt.NDArray[np.int64]


def num_accepted(drafts: Int, num_drafts: Int, targets: Int) -> Int64:
    """How many drafts of each of S sequences are what the model chose itself, up to the first that is not. int64 [S].

    `drafts` [S, K], row i valid in its first `num_drafts[i]` columns; `targets` [S, 1 + K]: column j is the choice after j drafts.
    """
    most = drafts.shape[1]
    right = (drafts == targets[:, :most]) & (np.arange(most) < num_drafts[:, None])
    accepted: Int64 = np.cumprod(right, axis=1).sum(axis=1)
    return accepted
