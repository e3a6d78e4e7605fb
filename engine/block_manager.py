"""Who owns each KV block: references, the free queue, the prefix cache, and blocks that a step in flight still uses.

A block is in exactly one of four places: *owned* (references > 0), *blank* (free, content worthless), *cached* (free, content
findable by hash until the block is taken), or *quarantined* (no reference left, but a step in flight may still touch it).
Block 0 is never used. Blank blocks are taken first, then cached ones, least recently freed first.
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq

from protocol.errors import ProtocolError

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
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._cached = _FreedBlocks(num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}
        """Further blocks with the hash of a block in `_block_of`, oldest first."""
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._num_scheduled = 0
        self._num_committed = 0
        self._quarantine: deque[tuple[int, int, list[int]]] = deque()
        """(last step that may touch them, serial number, blocks), oldest first."""
        self._serial = 0
        self._kept_back: dict[int, int] = {}
        """Block -> serial number of the entry of `_quarantine` that is to free it: the last, if it was hit and released again meanwhile."""
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
        return len(self._kept_back)

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - len(self._kept_back)

    # ---- taking and giving back

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, one reference each. Raises ProtocolError if fewer are free: callers look first."""
        if count > self.num_free:
            raise ProtocolError(f"{count} blocks asked for, {self.num_free} are free")
        blank, references = self._blank, self._references
        taken: list[int] = []
        if blank:
            start = max(len(blank) - count, 0)
            taken = blank[start:]
            taken.reverse()
            del blank[start:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        """Takes the cached blocks that were freed first; their content can no longer be found."""
        blocks = self._cached.pop(count)
        if self._twins:
            for block in blocks:
                self._unname(block)
            return blocks
        hash_of, block_of = self._hash_of, self._block_of
        hashes = [block_hash for block in blocks if (block_hash := hash_of[block]) is not None]
        for block_hash in hashes:
            del block_of[block_hash]
        for block in blocks:
            hash_of[block] = None
        self._removed.extend(hashes)
        return blocks

    def acquire(self, blocks: Seq[int]) -> None:
        """Adds a reference to each: to blocks found by `lookup`, or to blocks somebody owns already."""
        references = self._references
        for block in blocks:
            if references[block] == 0 and self._kept_back.pop(block, None) is None:
                self._cached.remove(block)
            references[block] += 1

    def release(self, blocks: Seq[int]) -> None:
        """Gives up one reference to each block of one owner, given in sequence order (no block twice); the tail becomes reusable first."""
        references, gone = self._references, list(reversed(blocks))
        counts = [references[block] for block in gone]
        if counts.count(1) == len(counts):
            for block in gone:
                references[block] = 0
        elif 0 in counts:
            raise ProtocolError(f"block {gone[counts.index(0)]} was freed more often than taken")
        else:
            for block in gone:
                references[block] -= 1
            gone = [block for block in gone if not references[block]]
        if self._num_scheduled == self._num_committed:
            self._make_free(gone)
            return
        self._serial += 1
        self._quarantine.append((self._num_scheduled, self._serial, gone))
        self._kept_back.update(dict.fromkeys(gone, self._serial))

    def free(self, block_ids: Seq[int]) -> None:
        """`release` for owners outside the scheduler: gives up one of their references to each block."""
        self.num_external -= len(block_ids)
        if self.num_external < 0:
            raise ProtocolError(f"blocks {list(block_ids)} were freed by somebody who does not own them")
        self.release(block_ids)

    def incref(self, block_ids: Seq[int]) -> None:
        """One more outside reference to each block, which somebody must own already."""
        if any(self._references[block] == 0 for block in block_ids):
            raise ProtocolError(f"blocks {list(block_ids)} are not all owned")
        self.acquire(block_ids)
        self.num_external += len(block_ids)

    def hand_over(self, count: int) -> None:
        """`count` references of the scheduler now belong to somebody outside."""
        self.num_external += count

    def _make_free(self, gone: list[int]) -> None:
        hash_of = self._hash_of
        cached = [block for block in gone if hash_of[block] is not None]
        if len(cached) == len(gone) - 1 and hash_of[gone[0]] is None:  # as most answers end: in the middle of a block
            self._blank.append(gone[0])
        elif len(cached) < len(gone):
            self._blank += [block for block in gone if hash_of[block] is None]
        self._cached.push(cached)

    # ---- steps in flight

    def step_scheduled(self) -> None:
        """From now on what is released is kept back until this step has committed."""
        self._num_scheduled += 1

    def step_committed(self) -> None:
        """The oldest step in flight is done with its blocks."""
        self._num_committed += 1
        while self._quarantine and self._quarantine[0][0] <= self._num_committed:
            _, serial, gone = self._quarantine.popleft()
            gone = [block for block in gone if self._kept_back.get(block) == serial]
            for block in gone:
                del self._kept_back[block]
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
        return sum(self._references[block] == 0 and block not in self._kept_back for block in blocks)

    def insert(self, hashes: Seq[bytes], blocks: Seq[int]) -> None:
        """Makes owned blocks findable, each by its hash; those that already are stay as they are."""
        hash_of, block_of = self._hash_of, self._block_of
        any_named = any(map(hash_of.__getitem__, blocks))
        if not any_named and block_of.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
            for block_hash, block in zip(hashes, blocks, strict=True):
                hash_of[block] = block_hash
                block_of[block_hash] = block
            self._added.extend(hashes)
            return
        for block_hash, block in zip(hashes, blocks, strict=True):
            if hash_of[block] is not None:
                continue
            hash_of[block] = block_hash
            if block_of.setdefault(block_hash, block) == block:
                self._added.append(block_hash)
            else:
                self._twins.setdefault(block_hash, []).append(block)

    def forget(self, block: int) -> None:
        """Makes a block unfindable. No-op if it already is."""
        if self._hash_of[block] is None:
            return
        if self._references[block] == 0 and block not in self._kept_back:
            self._cached.remove(block)
            self._blank.append(block)
        self._unname(block)

    def _unname(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
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
        return all(self._references[block] > 0 for block in block_ids)

    def take_hash_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Hashes (added, removed) since the last call, each at most `MAX_LOGGED_HASHES`; one in both lists may be either now."""
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def check(self) -> None:
        """Every block is in exactly one place. Raises ProtocolError."""
        free = self._blank + self._cached.in_order()
        num_owned = sum(count > 0 for count in self._references)
        if len(set(free)) != len(free) or 0 in free or any(self._references[block] for block in free):
            raise ProtocolError("a free block is owned, listed twice, or block 0")
        if num_owned + len(free) + len(self._kept_back) != self.num_usable:
            raise ProtocolError(f"{len(free)} free + {num_owned} owned + {len(self._kept_back)} kept back != {self.num_usable}")
        if any(self._hash_of[block] is None for block in self._cached.in_order()) or any(self._hash_of[block] for block in self._blank):
            raise ProtocolError("a block is cached without a hash, or blank with one")


class _FreedBlocks:
    """Free blocks whose content can still be found, freed first, first. A queue that any of them may leave from the middle.

    Who does leaves his entry behind: of the entries of one block only the last may be its own. (An OrderedDict costs ten times as much.)
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue: list[int] = []
        self._head = 0
        """Entries before it were popped."""
        self._left: Counter[int] = Counter()
        """Entries left behind, by block; they come before its own."""
        self._num_left = 0
        self._max_entries = 2 * num_blocks

    def __len__(self) -> int:
        return len(self._queue) - self._head - self._num_left

    def in_order(self) -> list[int]:
        left, blocks = self._left.copy(), []
        for block in self._queue[self._head :]:
            if left[block]:
                left[block] -= 1
            else:
                blocks.append(block)
        return blocks

    def push(self, blocks: list[int]) -> None:
        self._queue += blocks
        if len(self._queue) <= self._max_entries:
            return
        del self._queue[: self._head]
        self._head = 0
        if self._num_left > self._max_entries // 4:
            self._queue = self.in_order()
            self._left.clear()
            self._num_left = 0

    def remove(self, block: int) -> None:
        """The block must be in here."""
        self._left[block] += 1
        self._num_left += 1

    def pop(self, count: int) -> list[int]:
        """Takes the `count` that were freed first; there must be as many."""
        queue, left, head = self._queue, self._left, self._head
        if not left:
            self._head = head + count
            return queue[head : head + count]
        blocks: list[int] = []
        while len(blocks) < count:
            block = queue[head]
            head += 1
            if block not in left:
                blocks.append(block)
                continue
            self._num_left -= 1
            left[block] -= 1
            if not left[block]:
                del left[block]
        self._head = head
        return blocks
