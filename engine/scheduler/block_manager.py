"""Who owns each KV block: references, the free queue, the prefix cache, and blocks that a step in flight still uses.

A block is in exactly one of four places. It is *owned* (references > 0), *blank* (free, its content is worthless),
*cached* (free, its content can be found by hash until the block is taken), or *held* (it has no reference left, but a
step in flight may still touch it). Block 0 is never used. Blank blocks are taken first, then cached ones, least
recently freed first.

Lists of blocks may be any sequences of ints; int32 arrays cost least. Hashes are int32 [n, 4], as
in protocol/block_hash.py.
"""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from engine.scheduler import loops_blocks
from engine.scheduler.loops_blocks import Arrays, BlockIds, Blocks, Counts, Index, Log
from protocol.arrays import Int32
from protocol.block_hash import HASH_WORDS, from_rows
from protocol.errors import ProtocolError

MAX_LOGGED_HASHES = 65536
"""How many cache changes are kept for the next status. Older ones are dropped: a router that misses some only
routes less well.
"""

MAX_SERIAL = 2**31 - 1

NO_BLOCKS = BlockIds(np.zeros(0, np.int32))


class BlockManager:
    """All KV blocks of one engine. Owners of references outside the scheduler (leases, revoked prompts) call `free`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: {num_blocks} is below 2 (block 0 is never used)")
        self.num_blocks = num_blocks
        self.num_external = 0
        """References that are owned outside the scheduler."""
        loops_blocks.compile_all()
        self._blocks = Blocks(np.zeros((num_blocks, loops_blocks.NUM_COLUMNS), np.int32))
        self._blocks[:, loops_blocks.NEXT_SAME_HASH] = loops_blocks.UNHASHED
        self._blocks[1:-1, loops_blocks.NEXT] = np.arange(2, num_blocks)
        self._index = Index(np.zeros((1 << (num_blocks * 3 // 2).bit_length(), 2), np.int32))
        self._counts = Counts(np.zeros(loops_blocks.NUM_COUNTS, np.int64))
        self._counts[loops_blocks.BLANK], self._counts[loops_blocks.NUM_BLANK] = 1, num_blocks - 1
        self._log = Log(np.empty((2, MAX_LOGGED_HASHES, HASH_WORDS), np.int32))
        self.arrays: Arrays = (self._blocks, self._index, self._counts, self._log)
        """The arrays in the order in which the loops take them."""
        self._num_scheduled = 0
        self._num_committed = 0
        self._held: deque[tuple[int, int, BlockIds]] = deque()
        """(last step that may touch the blocks, serial number, blocks) of each release under a step in
        flight, oldest first.
        """
        self._serial = 0
        """Serial number of the last release under a step in flight. A held block carries the number of the release that
        is to free it: the last one, if the block was hit and released again meanwhile.
        """

    # ---- counts

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that may be taken now, with the cached ones."""
        return int(self._counts[loops_blocks.NUM_BLANK] + self._counts[loops_blocks.NUM_CACHED])

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return int(self._counts[loops_blocks.NUM_CACHED])

    @property
    def num_held(self) -> int:
        return int(self._counts[loops_blocks.NUM_HELD])

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - self.num_held

    # ---- taking and giving back

    def allocate(self, count: int, hits: Int32 = NO_BLOCKS) -> BlockIds:
        """Takes one reference to each of `count` blocks: `hits`, as `lookup` found them, and then free ones. Raises
        ProtocolError if fewer are free: callers look first.
        """
        taken = self.allocate_if(count, count, hits)
        if taken is None:
            raise ProtocolError(f"{count} blocks asked for, {self.num_free} are free")
        return taken

    def allocate_if(self, room: int, count: int, hits: Int32 = NO_BLOCKS) -> BlockIds | None:
        """Does what `allocate` does if there are enough for `room` >= `count` blocks. Returns None otherwise."""
        taken = BlockIds(np.empty(count, np.int32))
        taken[: len(hits)] = hits
        return taken if loops_blocks.take(*self.arrays, taken, len(hits), room) else None

    def release(self, blocks: Seq[int] | Int32) -> None:
        """Gives up one reference to each block of one owner. The blocks come in sequence order, no block twice; the
        last ones are taken again first. Raises ProtocolError, and changes nothing, if a block has no owner.
        """
        given = np.asarray(blocks, np.int32)
        serial, held = 0, NO_BLOCKS
        if self._num_scheduled > self._num_committed:
            serial = self._serial = self._serial % MAX_SERIAL + 1
            held = BlockIds(np.empty(len(given), np.int32))
        count = loops_blocks.release(self._blocks, self._counts, given, serial, held)
        if count < 0:
            raise ProtocolError(f"block {given[-1 - count]} was freed more often than taken")
        if serial:
            self._held.append((self._num_scheduled, serial, BlockIds(held[:count])))

    def free(self, block_ids: Seq[int] | Int32) -> None:
        """`release` for owners outside the scheduler. Raises ProtocolError if they own fewer references."""
        given = np.asarray(block_ids, np.int32)
        self.num_external -= len(given)
        if self.num_external < 0:
            raise ProtocolError(f"blocks {given.tolist()} were freed by somebody who does not own them")
        self.release(given)

    def hand_over(self, count: int) -> None:
        """From now on `count` references of the scheduler belong to an owner outside it."""
        self.num_external += count

    # ---- steps in flight

    def step_scheduled(self) -> None:
        """Blocks that are released from now on are held until this step has committed."""
        self._num_scheduled += 1

    def step_committed(self) -> None:
        """The oldest step in flight is done with its blocks."""
        self._num_committed += 1
        while self._held and self._held[0][0] <= self._num_committed:
            _, serial, held = self._held.popleft()
            loops_blocks.free_held(self._blocks, self._counts, held, serial)

    # ---- prefix cache

    def lookup(self, hashes: Int32) -> Int32:
        """Finds the blocks that hold the longest known prefix of a chain of hashes. Takes no reference."""
        hits = BlockIds(np.empty(len(hashes), np.int32))
        return hits[: loops_blocks.find(self._blocks, self._index, hashes, hits)]

    def insert(self, hashes: Int32, blocks: Seq[int] | Int32) -> None:
        """Makes owned blocks findable, each by its hash; a block that has a hash keeps it."""
        named = BlockIds(np.asarray(blocks, np.int32))
        if len(named) != len(hashes):
            raise ProtocolError(f"{len(hashes)} hashes for {len(named)} blocks")
        loops_blocks.name(*self.arrays, named, hashes)

    def forget(self, blocks: Seq[int] | Int32) -> None:
        """Makes blocks unfindable, those that are findable."""
        loops_blocks.forget(*self.arrays, np.asarray(blocks, np.int32))

    def visible(self) -> dict[bytes, int]:
        """The blocks that `lookup` can find, by hash. A copy, for checks."""
        blocks = self._index[self._index[:, 0] > 0, 0]
        hashes = self._blocks[blocks, loops_blocks.HASH : loops_blocks.HASH + HASH_WORDS]
        return dict(zip(from_rows(hashes), blocks.tolist(), strict=True))

    def references(self) -> Int32:
        """How many owners each block has: int32 [num_blocks]. For checks."""
        return np.maximum(self._blocks[:, loops_blocks.REFERENCES], 0)

    def all_owned(self, block_ids: Seq[int] | Int32) -> bool:
        """True if every one of these blocks has an owner, so that nobody else can take it. For checks."""
        return bool(self.references()[np.asarray(block_ids, np.int32)].all())

    def take_hash_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes (added, removed) since the last call, at most `MAX_LOGGED_HASHES` of each kind. A hash that is in both
        lists may be findable now or not.
        """
        counts = self._counts[[loops_blocks.NUM_ADDED, loops_blocks.NUM_REMOVED]].tolist()
        self._counts[[loops_blocks.NUM_ADDED, loops_blocks.NUM_REMOVED]] = 0
        added, removed = (from_rows(log[: min(count, len(log))]) for log, count in zip(self._log, counts, strict=True))
        return added, removed

    def free_in_order(self) -> list[int]:
        """Free blocks in the order in which they would be taken: blank ones, then cached ones. For checks."""
        blank = self._follow(int(self._counts[loops_blocks.BLANK]), self.num_free - self.num_cached)
        return blank + self._follow(int(self._blocks[0, loops_blocks.NEXT]), self.num_cached)

    def check(self) -> None:
        """Raises ProtocolError unless every block is in exactly one place."""
        references = self._blocks[:, loops_blocks.REFERENCES]
        named = self._blocks[:, loops_blocks.NEXT_SAME_HASH] != loops_blocks.UNHASHED
        free = self.free_in_order()
        if len(set(free)) != len(free) or 0 in free or references[free].any():
            raise ProtocolError("a free block is owned, listed twice, or block 0")
        num_owned, num_held = np.count_nonzero(references > 0), np.count_nonzero(references < 0)
        if num_held != self.num_held or num_owned + len(free) + num_held != self.num_usable:
            raise ProtocolError(f"{len(free)} free + {num_owned} owned + {num_held} held != {self.num_usable}")
        if named[free].tolist() != [False] * (self.num_free - self.num_cached) + [True] * self.num_cached:
            raise ProtocolError("a block is cached without a hash, or blank with one")

    def _follow(self, block: int, count: int) -> list[int]:
        """Lists `count` linked blocks, from `block` on. Raises ProtocolError if the links do not end there."""
        blocks: list[int] = []
        for _ in range(count):
            blocks.append(block)
            block = int(self._blocks[block, loops_blocks.NEXT])
        if block:
            raise ProtocolError(f"{count} free blocks are counted, but the last is followed by {block}")
        return blocks
