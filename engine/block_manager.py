"""Who owns each KV block: references, the free queue, the prefix cache, and blocks that a step in flight still uses.

A block is in exactly one of four places: *owned* (references > 0), *blank* (free, content worthless), *cached* (free, content
findable by hash until the block is taken), or *quarantined* (no reference left, but a step in flight may still touch it).
Block 0 is never used. Blank blocks are taken first, then cached ones, least recently freed first.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError

Int32 = npt.NDArray[np.int32]

MAX_LOGGED_HASHES = 65536
"""Cache changes kept for the next status; beyond it the oldest are dropped: a router that misses some only routes less well."""


class BlockManager:
    """All KV blocks of one engine. `free` may be called by whoever owns references outside the scheduler (leases, revoked prompts)."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: {num_blocks} is below 2 (block 0 is never used)")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.num_external = 0
        """References held outside the scheduler."""
        self._references = np.zeros(num_blocks, np.int32)
        self._hashed = np.zeros(num_blocks, np.bool_)
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}
        """Further blocks with the hash of a block in `_block_of`, oldest first."""
        self._hash_of: list[bytes | None] = [None] * num_blocks
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
        blank = self._blank
        num_blank = min(count, len(blank))
        taken = blank[len(blank) - num_blank :]
        taken.reverse()
        del blank[len(blank) - num_blank :]
        if num_blank < count:
            if count - num_blank > len(self._cached):
                raise ProtocolError(f"{count} blocks asked for, {num_blank + len(self._cached)} are free")
            for _ in range(count - num_blank):
                block, _ = self._cached.popitem(last=False)
                self.forget(block)
                taken.append(block)
        blocks = np.array(taken, np.int32)
        self._references[blocks] = 1
        return blocks

    def acquire(self, blocks: Seq[int]) -> None:
        """Adds a reference to each: to blocks found by `lookup`, or to blocks somebody owns already."""
        for block in blocks:
            if self._references[block] == 0:
                if block in self._cached:
                    del self._cached[block]
                else:
                    self._num_quarantined -= 1
            self._references[block] += 1

    def release(self, blocks: Int32) -> None:
        """Gives up one reference to each block of one owner, given in sequence order (no block twice); the tail becomes reusable first."""
        left = self._references[blocks] - 1
        self._references[blocks] = left
        gone = blocks[left == 0][::-1]
        if left.size and left.min() < 0:
            raise ProtocolError(f"blocks {blocks[left < 0].tolist()} were freed more often than taken")
        if self._num_scheduled > self._num_committed:
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
        self._blank.extend(gone[~hashed].tolist())
        self._cached.update(dict.fromkeys(gone[hashed].tolist()))

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

    def lookup(self, hashes: Seq[bytes], limit: int) -> list[int]:
        """Blocks holding the longest known prefix of a chain of hashes, at most `limit` of them. Takes no reference."""
        hits: list[int] = []
        for block_hash in hashes[:limit]:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_free_among(self, blocks: Seq[int]) -> int:
        """How many of these blocks count as free now: acquiring them uses them up."""
        return sum(block in self._cached for block in blocks)

    def insert(self, block_hash: bytes, block: int) -> None:
        """Makes an owned block findable. No-op if it already is."""
        if self._hashed[block]:
            return
        self._hashed[block] = True
        self._hash_of[block] = block_hash
        if self._block_of.setdefault(block_hash, block) != block:
            self._twins.setdefault(block_hash, []).append(block)
        else:
            self._added.append(block_hash)

    def forget(self, block: int) -> None:
        """Makes a block unfindable. No-op if it already is."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
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
        return bool((self._references[np.asarray(block_ids, np.int64)] > 0).all())

    def take_hash_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes (added, removed) since the last call, each at most `MAX_LOGGED_HASHES`; one in both lists may be either now."""
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def check(self) -> None:
        """Every block is in exactly one place. Raises ProtocolError."""
        references = self._references
        free = self._blank + list(self._cached)
        if len(set(free)) != len(free) or 0 in free or (free and references[free].any()):
            raise ProtocolError("a free block is owned, listed twice, or block 0")
        if int((references > 0).sum()) + len(free) + self._num_quarantined != self.num_usable:
            raise ProtocolError(
                f"{len(free)} free + {int((references > 0).sum())} owned + {self._num_quarantined} kept back != {self.num_usable}"
            )
