"""The drafts that the n-gram proposer finds."""

import numpy as np
import pytest

from engine.scheduler.proposer import NGramProposer
from protocol.messages import RequestKey

KEY = RequestKey(1, "a", 1)


@pytest.mark.parametrize(
    ("tokens", "max_num_drafts", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 1, 2], 0, []),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, [9, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),
        ([1, 2, 3, 4], 3, []),
        ([5, 5, 5], 3, [5]),
        ([5], 3, []),
        ([1, 7, 2, 7], 3, []),
    ],
    ids=[
        "what followed",
        "at most",
        "none wanted",
        "longest match wins",
        "latest place wins",
        "never seen",
        "runs",
        "too short",
        "one is not enough",
    ],
)
def test_drafts_are_what_followed_last_time(tokens: list[int], max_num_drafts: int, drafts: list[int]) -> None:
    assert NGramProposer().propose(KEY, np.array(tokens, np.int32), max_num_drafts) == drafts
