"""Block ids of a pull are checked."""

import pytest

from kv_transfer.block_ids import checked_pairs
from protocol.errors import PullFailed


@pytest.mark.parametrize(("src", "dst"), [([4], [0]), ([0], [6]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])])
def test_bad_ids_are_refused(src: list[int], dst: list[int]) -> None:
    with pytest.raises(PullFailed):
        checked_pairs(src, 4, dst, 6)
