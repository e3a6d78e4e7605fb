"""Lease words, their indices, and ids."""

import numpy as np
import pytest

from kv_transfer.lease import LeaseTable
from protocol.errors import CapacityError


def test_a_new_table_clears_what_an_earlier_life_left() -> None:
    words = np.array([1 << 32 | 5, 0, 7], np.uint64)
    LeaseTable(words, epoch=2)
    assert words.tolist() == [0, 0, 0]


def test_write_and_clear_are_seen_in_the_shared_words() -> None:
    words = np.zeros(2, np.uint64)
    table = LeaseTable(words, epoch=2**32 - 1)
    index, lease_id = table.allocate(), table.next_lease_id()
    assert index is not None
    table.write(index, lease_id)
    assert int(words[index]) == lease_id == (2**32 - 1) << 32 | 1
    table.clear(index)
    assert not words.any()


def test_words_are_handed_out_once_and_come_back_after_clearing() -> None:
    table = LeaseTable(np.zeros(2, np.uint64), epoch=1)
    indices = [table.allocate(), table.allocate()]
    assert sorted(index for index in indices if index is not None) == [0, 1]
    assert table.allocate() is None
    assert table.num_live == 2
    table.write(1, table.next_lease_id())
    with pytest.raises(ValueError, match="word 1"):
        table.free(1)
    table.clear(1)
    table.free(1)
    assert (table.num_live, table.allocate()) == (1, 1)


def test_ids_are_never_used_twice() -> None:
    first, second = LeaseTable(np.zeros(1, np.uint64), epoch=1), LeaseTable(np.zeros(1, np.uint64), epoch=2)
    ids = [table.next_lease_id() for table in (first, second) for _ in range(100)]
    assert len(set(ids)) == 200
    assert 0 not in ids
    first._counter = 2**32 - 1
    with pytest.raises(CapacityError):
        first.next_lease_id()
