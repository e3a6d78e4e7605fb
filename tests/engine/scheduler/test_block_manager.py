"""The block manager: which blocks can be taken, and what can be found in them."""

import numpy as np
import pytest

from engine.scheduler import block_manager
from engine.scheduler.block_manager import BlockManager
from protocol.arrays import Int32
from protocol.block_hash import HASH_BYTES, to_rows
from protocol.errors import ProtocolError


def named(letters: str) -> bytes:
    return letters.encode().ljust(HASH_BYTES)


def names(*letters: str) -> Int32:
    return to_rows(map(named, letters))


def lookup(blocks: BlockManager, *letters: str) -> list[int]:
    hits: list[int] = blocks.lookup(names(*letters)).tolist()
    return hits


def cached(blocks: BlockManager, *letters: str) -> list[int]:
    """Takes blocks, gives them hashes and frees them. The block of the last letter is taken again first."""
    taken = blocks.allocate(len(letters))
    blocks.insert(names(*letters), taken)
    blocks.release(taken)
    return list(taken.tolist())


def test_blank_blocks_go_first_then_the_ones_freed_longest_ago_tails_before_heads() -> None:
    blocks = BlockManager(7)
    first = cached(blocks, "a", "b")
    second = cached(blocks, "c", "d")
    blank = set(range(1, 7)) - {*first, *second}
    assert set(blocks.allocate(2)) == blank
    assert blocks.allocate(4).tolist() == [*reversed(first), *reversed(second)]
    assert lookup(blocks, "a", "b", "c", "d") == []
    blocks.check()


def test_a_hit_is_taken_out_of_the_middle_and_lines_up_again_at_the_end() -> None:
    blocks = BlockManager(5)
    a, b, c, d = cached(blocks, "a", "b", "c", "d")
    hits = lookup(blocks, "a", "b", "x")
    assert hits == [a, b]
    blocks.allocate(len(hits), np.array(hits, np.int32))
    assert blocks.num_free == 2
    blocks.release(hits)
    assert blocks.allocate(4).tolist() == [d, c, b, a]


def test_room_is_asked_beyond_what_is_taken_and_a_hit_that_is_owned_needs_none() -> None:
    blocks = BlockManager(6)
    cached(blocks, "a", "b")
    (a,) = blocks.allocate(1, blocks.lookup(names("a")))
    hits = blocks.lookup(names("a", "b"))
    assert blocks.allocate_if(6, 3, hits) is None and blocks.num_free == 4
    taken = blocks.allocate_if(5, 3, hits)
    assert blocks.allocate_if(4, 3, hits) is not None and taken is not None
    assert taken[0] == a and blocks.references()[a] == 3 and blocks.num_free == 1


def test_block_0_is_never_used_and_too_many_are_refused() -> None:
    blocks = BlockManager(4)
    assert sorted(blocks.allocate(3)) == [1, 2, 3]
    with pytest.raises(ProtocolError, match="1 blocks asked for, 0 are free"):
        blocks.allocate(1)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockManager(1)


def test_the_oldest_of_several_blocks_with_one_hash_is_hit() -> None:
    blocks = BlockManager(6)
    taken = blocks.allocate(3)
    blocks.insert(names("a", "a"), taken[:2])
    blocks.insert(names("a"), taken[2:])
    oldest, middle, newest = taken.tolist()
    assert lookup(blocks, "a") == [oldest]
    blocks.forget([middle])
    assert lookup(blocks, "a") == [oldest]
    blocks.forget([oldest])
    assert lookup(blocks, "a") == [newest]
    blocks.forget([newest])
    assert lookup(blocks, "a") == []
    assert blocks.take_hash_changes() == ((named("a"),), (named("a"),))
    assert blocks.take_hash_changes() == ((), ())


def test_twins_are_found_in_the_order_in_which_they_were_named() -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(3).tolist()
    for block in taken:
        blocks.insert(names("a"), [block])
    found = []
    while hits := lookup(blocks, "a"):
        found += hits
        blocks.forget(hits)
    assert found == taken


def test_an_evicted_twin_leaves_the_other_to_be_found() -> None:
    blocks = BlockManager(3)
    taken = blocks.allocate(2)
    blocks.insert(names("a", "a"), taken)
    blocks.release(taken)
    (evicted,) = blocks.allocate(1)
    (found,) = lookup(blocks, "a")
    assert {evicted, found} == {1, 2}


def test_a_block_with_a_hash_keeps_it() -> None:
    blocks = BlockManager(3)
    taken = blocks.allocate(2)
    blocks.insert(names("a"), taken[:1])
    blocks.insert(names("b", "c"), taken)
    assert blocks.visible() == {named("a"): taken[0], named("c"): taken[1]}


def test_what_is_released_under_a_step_is_free_when_all_steps_scheduled_before_have_committed() -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(2)
    blocks.step_scheduled()
    blocks.step_scheduled()
    blocks.release(taken)
    assert (blocks.num_free, blocks.num_held, blocks.num_owned) == (1, 2, 0)
    blocks.step_committed()
    blocks.step_scheduled()
    assert blocks.num_free == 1
    blocks.step_committed()
    assert (blocks.num_free, blocks.num_held) == (3, 0)
    blocks.check()


def test_a_block_hit_and_released_again_while_kept_back_is_freed_once_and_late() -> None:
    blocks = BlockManager(3)
    taken = blocks.allocate(1)
    blocks.insert(names("a"), taken)
    blocks.step_scheduled()
    blocks.release(taken)
    blocks.allocate(1, blocks.lookup(names("a")))
    assert blocks.num_held == 0
    blocks.step_scheduled()
    blocks.release(taken)
    blocks.step_committed()
    assert (blocks.num_free, blocks.num_held) == (1, 1)
    blocks.step_committed()
    assert (blocks.num_free, blocks.num_held) == (2, 0)
    blocks.check()


def test_blocks_that_were_handed_over_are_freed_once() -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(2)
    blocks.hand_over(2)
    blocks.free(taken)
    assert not blocks.all_owned(taken)
    assert blocks.num_free == 3
    with pytest.raises(ProtocolError, match="does not own"):
        blocks.free(taken)


def test_freeing_too_often_is_an_error() -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(2)
    blocks.release(taken)
    with pytest.raises(ProtocolError, match="more often"):
        blocks.release(taken)


@pytest.mark.parametrize("unknown", [0, 4, -1])
def test_a_block_that_nobody_can_own_cannot_be_freed(unknown: int) -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(3).tolist()
    with pytest.raises(ProtocolError, match=f"block {unknown} was freed more often"):
        blocks.release([*taken, unknown])
    assert blocks.all_owned(taken), "nothing has changed"


def test_each_block_has_one_hash() -> None:
    blocks = BlockManager(4)
    with pytest.raises(ProtocolError, match="1 hashes for 2 blocks"):
        blocks.insert(names("a"), blocks.allocate(2))


def test_of_more_cache_changes_than_are_kept_the_last_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "MAX_LOGGED_HASHES", 2)
    blocks = BlockManager(5)
    taken = cached(blocks, "a", "b", "c")
    added, removed = blocks.take_hash_changes()
    assert (set(added), removed) == ({named("b"), named("c")}, ())
    blocks.forget(taken)
    cached(blocks, "d")
    added, removed = blocks.take_hash_changes()
    assert (added, set(removed)) == ((named("d"),), {named("b"), named("c")})


def test_the_queue_of_cached_blocks_survives_many_rounds() -> None:
    blocks = BlockManager(8)
    for turn in range(50):
        cached(blocks, *[f"{turn}-{index}" for index in range(3)])
        hits = lookup(blocks, f"{turn}-0")
        blocks.allocate(len(hits), np.array(hits, np.int32))
        blocks.release(hits)
        blocks.check()
    assert blocks.num_free == 7
    assert len(set(blocks.allocate(7))) == 7
