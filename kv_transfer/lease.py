"""Lease words at the prefill side: each lease has 8 bytes in memory that decode engines can read.

A decode engine reads the bytes of a block, passes a barrier, then reads the word. The prefill engine clears the word,
passes a barrier, then frees the block. So whoever still sees the word has read bytes from before the clearing.
"""

import threading

from protocol.arrays import UInt64
from protocol.errors import CapacityError

Words = UInt64
"""uint64 [num_words]. A word is 0 where no lease is live."""

_fence = threading.Lock()


def barrier() -> None:
    """This is a full memory fence: taking and releasing a lock is one on every platform that Python runs on."""
    with _fence:
        pass


def read_word(words: Words, index: int) -> int:
    """This is the decode side's read: the word as it is now, after every byte that was read before."""
    barrier()
    return int(words[index])


class LeaseTable:
    """One prefill engine's lease words. `words` may lie in shared memory and is cleared here, before any cache is
    handed out.
    """

    def __init__(self, words: Words, epoch: int) -> None:
        self.num_words = len(words)
        self._words = words
        self._free = list(range(self.num_words - 1, -1, -1))
        self._epoch = epoch
        self._counter = 0
        words[:] = 0
        barrier()

    @property
    def num_live(self) -> int:
        """Words that are allocated now."""
        return self.num_words - len(self._free)

    def next_lease_id(self) -> int:
        """Returns `epoch << 32 | counter`. The counter begins with 1, so no value comes twice in the life of a
        deployment.
        """
        self._counter += 1
        if self._counter >> 32:
            raise CapacityError(f"lease ids: epoch {self._epoch} has used all {2**32 - 1}")
        return self._epoch << 32 | self._counter

    def allocate(self) -> int | None:
        """Returns the index of a word that is 0; None when all are taken."""
        return self._free.pop() if self._free else None

    def free(self, index: int) -> None:
        """Gives a word back that was cleared before. It may be allocated again at once: its next word differs from
        every earlier one.
        """
        if self._words[index]:
            raise ValueError(f"lease word {index} is freed while its word is {int(self._words[index]):#x}")
        self._free.append(index)

    def write(self, index: int, lease_id: int) -> None:
        """Makes the lease visible. The blocks' bytes must have been written before."""
        barrier()
        self._words[index] = lease_id

    def clear(self, index: int) -> None:
        """This is the fence: only after it may the lease's blocks be freed."""
        self._words[index] = 0
        barrier()
