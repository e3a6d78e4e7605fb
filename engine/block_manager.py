"""Who owns each KV block: references, the free queue, the prefix cache, and blocks that a step in flight still uses.

A block is in exactly one of four places: *owned* (references > 0), *blank* (free, content worthless), *cached* (free, content
findable by hash until the block is taken), or *quarantined* (no reference left, but a step in flight may still touch it).
Block 0 is never used. Blank blocks are taken first, then cached ones, least recently freed first.
"""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError

Int32 = npt.NDArray[np.int32]

MAX_LOGGED_HASHES = 65536
"""Cache changes kept for the next status; beyond it the oldest are dropped: a router that misses some only routes less well."""


class BlockManager:
    """All KV blocks of one engine. `free` may be called by whoever owns references outside the scheduler (leases, revoked prompts)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: {num_blocks} is below 2 (block 0 is never used)")
        self.num_blocks = num_blocks
        self.num_external = 0
        """References held outside the scheduler."""
        self._references = np.zeros(num_blocks, np.int32)
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._cached = _FreedBlocks(num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}
        """Further blocks with the hash of a block in `_block_of`, oldest first."""
        self._hashed = np.zeros(num_blocks, np.bool_)
        self._hash_of = np.empty(num_blocks, np.object_)
        """bytes, of those in `_hashed`."""
        self._num_scheduled = 0
        self._num_committed = 0
        self._quarantine: deque[tuple[int, int, Int32]] = deque()
        """(last step that may touch them, serial number, blocks), oldest first."""
        self._serial = 0
        self._serial_of = np.zeros(num_blocks, np.int64)
        """Entry of `_quarantine` that is to free the block: the last one, if it was hit and released again meanwhile."""
        self._num_quarantined = 0
        self._added: deque[bytes] = deque(maxlen=MAX_LOGGED_HASHES)
        self._removed: deque[bytes] = deque(maxlen=MAX_LOGGED_HASHES)

    # ---- counts

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that may be taken now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - self._num_quarantined

    # ---- taking and giving back

    def allocate(self, count: int) -> Int32:
        """Takes `count` blocks, one reference each. int32 [count]. Raises ProtocolError if fewer are free: callers look first."""
        if count > self.num_free:
            raise ProtocolError(f"{count} blocks asked for, {self.num_free} are free")
        blank = self._blank
        if not blank:
            blocks = self._evict(count)
        else:
            start = max(len(blank) - count, 0)
            blocks = np.array(blank[start:][::-1], np.int32)
            del blank[start:]
            if len(blocks) < count:
                blocks = np.concatenate((blocks, self._evict(count - len(blocks))))
        self._references[blocks] = 1
        return blocks

    def _evict(self, count: int) -> Int32:
        """Takes the cached blocks that were freed first; their content can no longer be found."""
        blocks = self._cached.pop(count)
        hashes: list[bytes] = self._hash_of[blocks].tolist()
        if self._twins or np.count_nonzero(self._hashed[blocks]) < count:
            for block in blocks.tolist():
                self.forget(block)
            return blocks
        self._hashed[blocks] = False
        self._removed.extend(hashes)
        for block_hash in hashes:
            del self._block_of[block_hash]
        return blocks

    def acquire(self, blocks: Seq[int]) -> None:
        """Adds a reference to each: to blocks found by `lookup`, or to blocks somebody owns already."""
        for block in blocks:
            if self._references[block] == 0:
                if block in self._cached:
                    self._cached.remove(block)
                else:
                    self._num_quarantined -= 1
            self._references[block] += 1

    def release(self, blocks: Int32) -> None:
        """Gives up one reference to each block of one owner, given in sequence order (no block twice); the tail becomes reusable first."""
        left = self._references[blocks] - 1
        self._references[blocks] = left
        gone = blocks[::-1]
        if np.count_nonzero(left):
            if left.min() < 0:
                raise ProtocolError(f"blocks {blocks[left < 0].tolist()} were freed more often than taken")
            gone = gone[left[::-1] == 0]
        if self._num_scheduled > self._num_committed:
            gone = gone.copy()
            self._serial += 1
            self._quarantine.append((self._num_scheduled, self._serial, gone))
            self._serial_of[gone] = self._serial
            self._num_quarantined += len(gone)
        else:
            self._make_free(gone)

    def free(self, block_ids: Seq[int]) -> None:
        """`release` for owners outside the scheduler: gives up one of their references to each block."""
        self.num_external -= len(block_ids)
        if self.num_external < 0:
            raise ProtocolError(f"blocks {list(block_ids)} were freed by somebody who does not own them")
        self.release(np.array(block_ids, np.int32))

    def incref(self, block_ids: Seq[int]) -> None:
        """One more outside reference to each block, which somebody must own already."""
        if any(self._references[block] == 0 for block in block_ids):
            raise ProtocolError(f"blocks {list(block_ids)} are not all owned")
        self.acquire(block_ids)
        self.num_external += len(block_ids)

    def hand_over(self, count: int) -> None:
        """`count` references of the scheduler now belong to somebody outside."""
        self.num_external += count

    def _make_free(self, gone: Int32) -> None:
        hashed = self._hashed[gone]
        if np.count_nonzero(hashed) < len(gone):
            self._blank.extend(gone[~hashed].tolist())
            gone = gone[hashed]
        self._cached.push(gone)

    # ---- steps in flight

    def step_scheduled(self) -> None:
        """From now on what is released is kept back until this step has committed."""
        self._num_scheduled += 1

    def step_committed(self) -> None:
        """The oldest step in flight is done with its blocks."""
        self._num_committed += 1
        while self._quarantine and self._quarantine[0][0] <= self._num_committed:
            _, serial, gone = self._quarantine.popleft()
            gone = gone[(self._references[gone] == 0) & (self._serial_of[gone] == serial)]
            self._num_quarantined -= len(gone)
            self._make_free(gone)

    # ---- prefix cache

    def lookup(self, hashes: Seq[bytes]) -> list[int]:
        """Blocks holding the longest known prefix of a chain of hashes. Takes no reference."""
        hits: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_free_among(self, blocks: Seq[int]) -> int:
        """How many of these blocks count as free now: acquiring them uses them up."""
        return sum(block in self._cached for block in blocks)

    def insert(self, hashes: Seq[bytes], blocks: Int32) -> None:
        """Makes owned blocks findable, each by its hash; those that already are stay as they are."""
        hashed = self._hashed[blocks]
        if np.count_nonzero(hashed):
            hashes = [block_hash for block_hash, known in zip(hashes, hashed.tolist(), strict=True) if not known]
            blocks = blocks[~hashed]
        self._hashed[blocks] = True
        self._hash_of[blocks] = hashes
        block_of = self._block_of
        if block_of.keys().isdisjoint(hashes):
            num_before = len(block_of)
            block_of.update(zip(hashes, blocks.tolist(), strict=True))
            if len(block_of) == num_before + len(hashes):
                self._added.extend(hashes)
                return
            for block_hash in hashes:  # the same content twice in one call: once more, one by one
                block_of.pop(block_hash, None)
        for block_hash, block in zip(hashes, blocks.tolist(), strict=True):
            if block_of.setdefault(block_hash, block) == block:
                self._added.append(block_hash)
            else:
                self._twins.setdefault(block_hash, []).append(block)

    def forget(self, block: int) -> None:
        """Makes a block unfindable. No-op if it already is."""
        if not self._hashed[block]:
            return
        block_hash = self._hash_of[block]
        self._hashed[block] = False
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._block_of[block_hash]
            self._removed.append(block_hash)
            return
        if self._block_of[block_hash] == block:
            self._block_of[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]

    def visible(self) -> dict[bytes, int]:
        """What `lookup` can find: block by hash. A copy, for checks."""
        return dict(self._block_of)

    def all_owned(self, block_ids: Seq[int]) -> bool:
        """Whether every one of these blocks has an owner: nobody else can get it. For checks."""
        return bool((self._references[np.array(block_ids, np.int64)] > 0).all())

    def take_hash_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes (added, removed) since the last call, each at most `MAX_LOGGED_HASHES`; one in both lists may be either now."""
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def check(self) -> None:
        """Every block is in exactly one place. Raises ProtocolError."""
        free = self._blank + self._cached.in_order().tolist()
        num_owned = int(np.count_nonzero(self._references))
        if len(set(free)) != len(free) or 0 in free or (free and self._references[free].any()):
            raise ProtocolError("a free block is owned, listed twice, or block 0")
        if num_owned + len(free) + self._num_quarantined != self.num_usable:
            raise ProtocolError(f"{len(free)} free + {num_owned} owned + {self._num_quarantined} kept back != {self.num_usable}")


class _FreedBlocks:
    """Free blocks whose content can still be found, in the order in which they were freed: a queue that any of them may leave.

    Who leaves from the middle leaves his entry behind; `_place` tells which entry of a block is its own.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.empty(2 * num_blocks, np.int32)
        self._head = self._tail = 0
        self._place = np.full(num_blocks, -1, np.int64)
        """Index in `_queue`; -1: not in here."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._place[block] >= 0)

    def in_order(self) -> Int32:
        """Everybody, the one freed first in front."""
        entries = self._queue[self._head : self._tail]
        return entries[self._place[entries] == np.arange(self._head, self._tail)]

    def push(self, blocks: Int32) -> None:
        if self._tail + len(blocks) > len(self._queue):
            kept = self.in_order()
            self._queue[: len(kept)] = kept
            self._place[kept] = np.arange(len(kept))
            self._head, self._tail = 0, len(kept)
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._count += len(blocks)

    def remove(self, block: int) -> None:
        self._place[block] = -1
        self._count -= 1

    def pop(self, count: int) -> Int32:
        """Takes the `count` that were freed first."""
        taken: list[Int32] = []
        lacking = count
        while lacking:
            end = min(self._head + lacking, self._tail)
            entries = self._queue[self._head : end]
            entries = entries[self._place[entries] == np.arange(self._head, end)]
            taken.append(entries)
            lacking -= len(entries)
            self._head = end
        blocks = taken[0] if len(taken) == 1 else np.concatenate(taken or [self._queue[:0]])
        self._place[blocks] = -1
        self._count -= count
        return blocks
