"""Whatever happens, the block manager does what a model of plain lists does."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.block_manager import BlockManager
from protocol.block_hash import to_rows

HASHES = [np.array([first, 0, 0, last], np.int32).tobytes() for first in (0, -1) for last in (0, 1)]
"""Hashes with few first words. All of them crowd into the same buckets of the index, at its end and its beginning."""

NAMES = st.lists(st.sampled_from(HASHES), min_size=3, max_size=6)
CHAINS = st.lists(st.sampled_from(HASHES), max_size=6, unique=True)


@dataclass
class Model:
    blank: list[int]
    """Blank blocks; the last one is taken first."""
    cached: list[int] = field(default_factory=list)
    """Cached blocks; the first one is taken first."""
    references: dict[int, int] = field(default_factory=dict)
    hash_of: dict[int, bytes] = field(default_factory=dict)
    """Hashes by block, in the order in which the blocks got them."""
    kept: list[tuple[int, list[int]]] = field(default_factory=list)
    """(the last step that uses the blocks, held blocks)."""
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)

    def visible(self) -> dict[bytes, int]:
        return {name: block for block, name in reversed(self.hash_of.items())}

    def num_held(self) -> int:
        return sum(len(blocks) for _, blocks in self.kept)

    def lookup(self, names: list[bytes]) -> list[int]:
        visible, hits = self.visible(), []
        for name in names:
            if name not in visible:
                break
            hits.append(visible[name])
        return hits

    def acquire(self, block: int) -> None:
        if block in self.cached:
            self.cached.remove(block)
        for _, blocks in self.kept:
            if block in blocks:
                blocks.remove(block)
        self.references[block] = self.references.get(block, 0) + 1

    def take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block = self.cached.pop(0)
            self.unname(block)
        self.references[block] = 1
        return block

    def insert(self, names: list[bytes], blocks: list[int]) -> None:
        for name, block in zip(names, blocks, strict=True):
            if block not in self.hash_of:
                if name not in self.visible():
                    self.added.append(name)
                self.hash_of[block] = name

    def unname(self, block: int) -> None:
        name = self.hash_of.pop(block)
        if name not in self.visible():
            self.removed.append(name)

    def release(self, blocks: list[int], step: int | None) -> None:
        """`step` is the last one in flight; None if none is."""
        gone = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                gone.append(block)
        if step is None:
            self.make_free(gone)
        else:
            self.kept.append((step, gone))

    def make_free(self, blocks: list[int]) -> None:
        for block in blocks:
            (self.cached if block in self.hash_of else self.blank).append(block)

    def committed(self, step: int) -> None:
        for _, blocks in [entry for entry in self.kept if entry[0] <= step]:
            self.make_free(blocks)
        self.kept = [entry for entry in self.kept if entry[0] > step]

    def forget(self, block: int) -> None:
        if block in self.hash_of:
            if block in self.cached:
                self.cached.remove(block)
                self.blank.append(block)
            self.unname(block)


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self.model = Model(blank=list(range(num_blocks - 1, 0, -1)))
        self.owners: list[list[int]] = []
        self.num_scheduled = self.num_committed = 0

    @rule(wanted=CHAINS, num_more=st.integers(0, 8))
    def allocate(self, wanted: list[bytes], num_more: int) -> None:
        hits, expected = self.blocks.lookup(to_rows(wanted)), self.model.lookup(wanted)
        assert hits.tolist() == expected
        num_free = sum(block in self.model.cached for block in expected)
        num_more = min(num_more, self.blocks.num_free - num_free)
        for block in expected:
            self.model.acquire(block)
        expected += [self.model.take() for _ in range(num_more)]
        assert self.blocks.allocate(len(expected), hits).tolist() == expected
        if expected:
            self.owners.append(expected)

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 20))
    def release(self, pick: int) -> None:
        taken = self.owners.pop(pick % len(self.owners))
        self.model.release(taken, self.num_scheduled if self.num_scheduled > self.num_committed else None)
        self.blocks.release(taken)

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 20), names=NAMES)
    def insert(self, pick: int, names: list[bytes]) -> None:
        taken = self.owners[pick % len(self.owners)][: len(names)]
        names = names[: len(taken)]
        self.model.insert(names, taken)
        self.blocks.insert(to_rows(names), taken)

    @precondition(lambda self: self.model.hash_of)
    @rule(pick=st.integers(0, 20))
    def forget(self, pick: int) -> None:
        block = list(self.model.hash_of)[pick % len(self.model.hash_of)]
        self.model.forget(block)
        self.blocks.forget([block])
        self.blocks.forget([block])  # changes nothing

    @rule()
    def schedule(self) -> None:
        self.num_scheduled += 1
        self.blocks.step_scheduled()

    @precondition(lambda self: self.num_committed < self.num_scheduled)
    @rule()
    def commit(self) -> None:
        self.num_committed += 1
        self.blocks.step_committed()
        self.model.committed(self.num_committed)

    @rule()
    def report(self) -> None:
        assert self.blocks.take_hash_changes() == (tuple(self.model.added), tuple(self.model.removed))
        self.model.added.clear()
        self.model.removed.clear()

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "blocks"):
            return
        blocks, model = self.blocks, self.model
        blocks.check()
        assert blocks.free_in_order() == model.blank[::-1] + model.cached
        assert {block: count for block, count in enumerate(blocks.references().tolist()) if count} == model.references
        assert blocks.visible() == model.visible()
        assert (blocks.num_cached, blocks.num_held) == (len(model.cached), model.num_held())
        assert blocks.num_owned == len(model.references)
        for name in HASHES:
            assert blocks.lookup(to_rows([name])).tolist() == model.lookup([name])


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
