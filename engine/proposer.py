"""Drafts without a model: what followed the last tokens the last time they were seen."""

import numpy as np
import numpy.typing as npt

from protocol.messages import RequestKey


class NGramProposer:
    """Looks for the latest earlier place with the same last `max_num_tokens` tokens, then with fewer, down to `min_num_tokens`."""

    def __init__(self, *, min_num_tokens: int = 2, max_num_tokens: int = 4) -> None:
        self._lengths = range(max_num_tokens, min_num_tokens - 1, -1)

    def propose(self, key: RequestKey, token_ids: npt.NDArray[np.int32], max_num_drafts: int) -> list[int]:
        """The tokens that followed that place, at most `max_num_drafts`; none if it was never seen."""
        if max_num_drafts < 1:
            return []
        ends = (token_ids[:-1] == token_ids[-1]).nonzero()[0]
        for length in self._lengths:
            fitting = ends[ends >= length - 1]
            for back in range(1, length):
                fitting = fitting[token_ids[fitting - back] == token_ids[-1 - back]] if len(token_ids) > length else fitting[:0]
            if len(fitting):
                start = int(fitting[-1]) + 1
                drafts: list[int] = token_ids[start : start + max_num_drafts].tolist()
                return drafts
        return []
