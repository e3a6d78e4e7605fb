"""The interface every transport keeps. Block ids go in, bytes move, a word is read; no request is known here.

export(cache, lease_words) -> Endpoint      the prefill side makes its blocks and lease words readable (exports.py)
connect(endpoint) -> Peer                   the decode side opens them
peer.pull(src_blocks, dst_blocks) -> Pending
peer.read_word(slot) -> int                 read after the last byte of a pull has arrived
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
"""uint8 [num_blocks, block_bytes]: a cache in host memory as a transport sees it; one on a GPU is
`device.DeviceBlocks`.
"""

Endpoint = bytes
"""Opaque to everyone but the same transport on the other side; travels in `Hello` and `PeerUp`."""


class Pending(Protocol):
    """One pull under way. Terminal exactly once; only then may the destination blocks be freed."""

    def poll(self) -> bool:
        """True once terminal: all bytes are there, or none will come any more. Never blocks."""
        ...

    @property
    def error(self) -> str:
        """Empty when the bytes arrived; else why not. Meaningful only once terminal."""
        ...

    def cancel(self) -> None:
        """Asks the transport to fail the pull soon. It still becomes terminal by itself."""
        ...


class Peer(Protocol):
    """The readable side of one remote engine, in one of its epochs."""

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Pending:
        """Starts copying whole blocks, `src_blocks[i]` there to `dst_blocks[i]` here. Raises PullFailed if it cannot
        start.
        """
        ...

    def read_word(self, slot: int) -> int:
        """The lease word as it is now. Full barrier before the read."""
        ...

    def close(self) -> None:
        """Unmaps. No pull may be under way."""
        ...


class Transport(Protocol):
    """How two engines reach each other's caches."""

    @property
    def name(self) -> str: ...

    def connect(self, endpoint: Endpoint) -> Peer:
        """Opens a peer. Raises PullFailed when it is gone, LayoutMismatch when its blocks have another size."""
        ...

    def close(self) -> None:
        """Ends what the transport runs. Pulls under way fail."""
        ...
