"""The loops over blocks, compiled: a step that lets two sequences in and two out moves some two hundred blocks.

They are plain loops over arrays: where numba is absent they run as they stand, slower and with the same results. They
are compiled when the first `BlockManager` is made. They do not check bounds: callers know their blocks.

Every function begins with arrays of the block manager, which has N blocks. Each kind of array has a type of its own,
which the type checker tells from the others, so that no two arguments can change places:

- `Blocks` int32 [N, 8]: the columns below. Block 0 is never used: its links are the two ends of the ring of cached
  blocks, and its hash is the one that is being looked for.
- `Index` int32 [a power of two >= 1.5 N, 2]: a hash table with open addressing. A bucket holds a block, the oldest one
  that has its hash, and the first word of this hash. A hash is looked for from bucket `first word & mask` on, up to the
  first empty bucket (block 0).
- `BlockIds` int32 [n]: ids of blocks. `Counts` int64 [NUM_COUNTS]: the counts below.
- `Log` int32 [2, M, 4]: two rings, of the last M hashes that became findable and the last M that ceased to be.
"""

from functools import cache
from typing import NewType

import numpy as np

from jit.loops_compile import compiled_loop, one_compiles, put_compiled
from protocol import block_hash
from protocol.arrays import Int32, Int64
from protocol.block_hash import HASH_WORDS

SOURCES = (__file__, block_hash.__file__)

Blocks = NewType("Blocks", Int32)
Index = NewType("Index", Int32)
Counts = NewType("Counts", Int64)
Log = NewType("Log", Int32)
BlockIds = NewType("BlockIds", Int32)
Arrays = tuple[Blocks, Index, Counts, Log]

REFERENCES = 0
"""How many owners the block has. A held block has the negated serial number of the release that is to free it."""
PREVIOUS = 1
"""For a cached block, the cached block that was freed before it."""
NEXT = 2
"""For a cached block, the one that was freed after it. For a blank block, the one that is taken after it; 0 if none."""
NEXT_SAME_HASH = 3
"""The next younger block with the same hash; 0 for the youngest, UNHASHED for a block without a hash."""
UNHASHED = -1
HASH = 4
"""The first of the 4 words of the hash."""
NUM_COLUMNS = 8

BLANK = 0
"""The blank block that is taken next; 0 if there is none."""
NUM_BLANK = 1
NUM_CACHED = 2
NUM_HELD = 3
NUM_ADDED = 4
"""Hashes written to `log[ADDED]` since the last status."""
NUM_REMOVED = 5
NUM_COUNTS = 6

ADDED = 0
REMOVED = 1


# ---- one block


@compiled_loop(SOURCES)
def _unlink(blocks: Blocks, counts: Counts, block: int) -> None:
    """Takes a block out of the ring of cached blocks."""
    before, after = blocks[block, PREVIOUS], blocks[block, NEXT]
    blocks[before, NEXT] = after
    blocks[after, PREVIOUS] = before
    counts[NUM_CACHED] -= 1


@compiled_loop(SOURCES)
def _push_blank(blocks: Blocks, counts: Counts, block: int) -> None:
    blocks[block, NEXT] = counts[BLANK]
    counts[BLANK] = block
    counts[NUM_BLANK] += 1


@compiled_loop(SOURCES)
def _make_free(blocks: Blocks, counts: Counts, block: int) -> None:
    """Makes a block that nobody owns or uses the last of the cached blocks, or the first of the blank ones."""
    if blocks[block, NEXT_SAME_HASH] == UNHASHED:
        _push_blank(blocks, counts, block)
        return
    last = blocks[0, PREVIOUS]
    blocks[last, NEXT] = blocks[0, PREVIOUS] = block
    blocks[block, PREVIOUS] = last
    blocks[block, NEXT] = 0
    counts[NUM_CACHED] += 1


@compiled_loop(SOURCES)
def _note(blocks: Blocks, counts: Counts, log: Log, which: int, block: int) -> None:
    """Adds the hash of a block to the ring `which`, ADDED or REMOVED."""
    at = counts[NUM_ADDED + which] % log.shape[1]
    for word in range(HASH_WORDS):
        log[which, at, word] = blocks[block, HASH + word]
    counts[NUM_ADDED + which] += 1


@compiled_loop(SOURCES)
def _write_hash(blocks: Blocks, block: int, hashes: Int32, i: int) -> None:
    for word in range(HASH_WORDS):
        blocks[block, HASH + word] = hashes[i, word]


@compiled_loop(SOURCES)
def _bucket(blocks: Blocks, index: Index, block: int) -> int:
    """The bucket in which the hash of a block is, or into which it would go."""
    mask, first = len(index) - 1, blocks[block, HASH]
    bucket: int = first & mask
    while index[bucket, 0]:
        if index[bucket, 1] == first:
            found, word = index[bucket, 0], 1
            while word < HASH_WORDS and blocks[found, HASH + word] == blocks[block, HASH + word]:
                word += 1
            if word == HASH_WORDS:
                break
        bucket = (bucket + 1) & mask
    return bucket


@compiled_loop(SOURCES)
def _empty_bucket(index: Index, bucket: int) -> None:
    """Empties a bucket. Entries behind it, up to the next empty bucket, move up as far as their own hashes allow."""
    mask = len(index) - 1
    hole, at = bucket, (bucket + 1) & mask
    while index[at, 0]:
        home = index[at, 1] & mask
        if (at - home) & mask >= (at - hole) & mask:
            index[hole, 0], index[hole, 1] = index[at, 0], index[at, 1]
            hole = at
        at = (at + 1) & mask
    index[hole, 0] = 0


@compiled_loop(SOURCES)
def name_block(blocks: Blocks, index: Index, counts: Counts, log: Log, block: int, hashes: Int32, i: int) -> None:
    """Makes a block findable by `hashes[i]`, unless it has a hash already."""
    if blocks[block, NEXT_SAME_HASH] != UNHASHED:
        return
    blocks[block, NEXT_SAME_HASH] = 0
    _write_hash(blocks, block, hashes, i)
    bucket = _bucket(blocks, index, block)
    older = index[bucket, 0]
    if not older:
        index[bucket, 0], index[bucket, 1] = block, blocks[block, HASH]
        _note(blocks, counts, log, ADDED, block)
        return
    while blocks[older, NEXT_SAME_HASH]:
        older = blocks[older, NEXT_SAME_HASH]
    blocks[older, NEXT_SAME_HASH] = block


@compiled_loop(SOURCES)
def _unname(blocks: Blocks, index: Index, counts: Counts, log: Log, block: int) -> None:
    """Makes a block unfindable. If others have its hash, the oldest of them is found from now on."""
    bucket, next_same_hash = _bucket(blocks, index, block), blocks[block, NEXT_SAME_HASH]
    blocks[block, NEXT_SAME_HASH] = UNHASHED
    older = index[bucket, 0]
    if older != block:
        while blocks[older, NEXT_SAME_HASH] != block:
            older = blocks[older, NEXT_SAME_HASH]
        blocks[older, NEXT_SAME_HASH] = next_same_hash
    elif next_same_hash:
        index[bucket, 0] = next_same_hash
    else:
        _empty_bucket(index, bucket)
        _note(blocks, counts, log, REMOVED, block)


@compiled_loop(SOURCES)
def pop(blocks: Blocks, index: Index, counts: Counts, log: Log) -> int:
    """Takes a free block, with one reference: a blank one, or else the cached one that was freed first."""
    if counts[NUM_BLANK]:
        block: int = counts[BLANK]
        counts[BLANK] = blocks[block, NEXT]
        counts[NUM_BLANK] -= 1
    else:
        block = blocks[0, NEXT]
        _unlink(blocks, counts, block)
        _unname(blocks, index, counts, log, block)
    blocks[block, REFERENCES] = 1
    return block


# ---- many blocks


@compiled_loop(SOURCES)
def count_free(blocks: Blocks, among: Int32) -> int:
    """How many blocks of `among` are free."""
    count = 0
    for block in among:
        if not blocks[block, REFERENCES]:
            count += 1
    return count


@compiled_loop(SOURCES)
def take(blocks: Blocks, index: Index, counts: Counts, log: Log, taken: BlockIds, num_found: int, room: int) -> int:
    """Takes one more reference to each of the first `num_found` blocks of `taken`, and fills the rest of it with free
    blocks. Returns 1. Returns 0, and changes nothing, if there are not enough for `room` blocks, found ones included.
    """
    if room - num_found + count_free(blocks, taken[:num_found]) > counts[NUM_BLANK] + counts[NUM_CACHED]:
        return 0
    for block in taken[:num_found]:
        if not blocks[block, REFERENCES]:
            _unlink(blocks, counts, block)
        elif blocks[block, REFERENCES] < 0:
            blocks[block, REFERENCES] = 0
            counts[NUM_HELD] -= 1
        blocks[block, REFERENCES] += 1
    for i in range(num_found, len(taken)):
        taken[i] = pop(blocks, index, counts, log)
    return 1


@compiled_loop(SOURCES)
def release(blocks: Blocks, counts: Counts, given: Int32, serial: int, held: BlockIds) -> int:
    """Gives up one reference to each block of `given`, from the last to the first. A block that has none left is free;
    with a `serial` (> 0) it is held under this number and written to `held` (as long as `given`). Returns how many
    blocks are held. Returns -1 - i, and changes nothing, if nobody owns given[i]."""
    for i in range(len(given)):
        if given[i] < 1 or given[i] >= len(blocks) or blocks[given[i], REFERENCES] <= 0:
            return -1 - i
    num_held = 0
    for block in given[::-1]:
        blocks[block, REFERENCES] -= 1
        if blocks[block, REFERENCES]:
            continue
        if not serial:
            _make_free(blocks, counts, block)
            continue
        blocks[block, REFERENCES] = -serial
        counts[NUM_HELD] += 1
        held[num_held] = block
        num_held += 1
    return num_held


@compiled_loop(SOURCES)
def free_held(blocks: Blocks, counts: Counts, held: BlockIds, serial: int) -> None:
    """Frees the blocks of `held` that are still held under this serial number."""
    for block in held:
        if blocks[block, REFERENCES] == -serial:
            blocks[block, REFERENCES] = 0
            counts[NUM_HELD] -= 1
            _make_free(blocks, counts, block)


@compiled_loop(SOURCES)
def find(blocks: Blocks, index: Index, wanted: Int32, found: BlockIds) -> int:
    """Finds the blocks with a chain of hashes [n, 4], up to the first hash that no block has, and writes them to
    `found` [n]. Returns their number."""
    for i in range(len(wanted)):
        _write_hash(blocks, 0, wanted, i)
        found[i] = index[_bucket(blocks, index, 0), 0]
        if not found[i]:
            return i
    return len(wanted)


@compiled_loop(SOURCES)
def name(blocks: Blocks, index: Index, counts: Counts, log: Log, named: BlockIds, names: Int32) -> None:
    """Makes blocks findable, each by its hash; a block that has a hash keeps it."""
    for i in range(len(named)):
        name_block(blocks, index, counts, log, named[i], names, i)


@compiled_loop(SOURCES)
def forget(blocks: Blocks, index: Index, counts: Counts, log: Log, forgotten: Int32) -> None:
    """Makes blocks unfindable, those that are findable."""
    for block in forgotten:
        if blocks[block, NEXT_SAME_HASH] == UNHASHED:
            continue
        if not blocks[block, REFERENCES]:
            _unlink(blocks, counts, block)
            _push_blank(blocks, counts, block)
        _unname(blocks, index, counts, log, block)


@cache
def compile_all() -> None:
    """Calls every loop once, with nothing to do."""
    ids, hashes, space = BlockIds(np.zeros(0, np.int32)), np.zeros((0, 0), np.int32), np.zeros((0, 0, 0), np.int32)
    blocks, index, counts, log = Blocks(hashes), Index(hashes), Counts(np.zeros(NUM_COUNTS, np.int64)), Log(space)
    put_compiled(globals())
    with one_compiles(SOURCES):
        take(blocks, index, counts, log, ids, 0, 0)
        release(blocks, counts, ids, 0, ids)
        free_held(blocks, counts, ids, 0)
        count_free(blocks, ids)
        find(blocks, index, hashes, ids)
        name(blocks, index, counts, log, ids, hashes)
        forget(blocks, index, counts, log, ids)
