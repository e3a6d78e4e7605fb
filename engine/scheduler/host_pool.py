"""Blocks in host memory that hold the KV of preempted sequences until these run again. They are numbered from 0.

Blocks are taken only while no step is in flight. So every step that copies out of a block or into it has committed
before the block can have another owner, however early it is released.
"""

from collections.abc import Sequence as Seq

from protocol.errors import ProtocolError


class HostPool:
    """Which blocks are owned. Each block belongs to one sequence or to nobody."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks. Raises ProtocolError if fewer are free: callers look first."""
        if count > len(self._free):
            raise ProtocolError(f"{count} host blocks asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owned[block] = True
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Frees blocks. Raises ProtocolError for a block that nobody owns."""
        for block in blocks:
            if not self._owned[block]:
                raise ProtocolError(f"host block {block} was freed more often than taken")
            self._owned[block] = False
        self._free.extend(reversed(blocks))
