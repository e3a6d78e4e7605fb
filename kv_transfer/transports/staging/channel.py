"""A ring of buffers in shared memory between two processes: one orders bytes, the other fills buffers with them.

    0        the ordering side's counter and doorbell
    64       the filling side's counter and doorbell
    4096     orders [num_buffers]: number of pieces, length of an error, the error's text, pieces int64 [MAX_PIECES, 2]
    ...      buffers [num_buffers, buffer_bytes], each from a page on

Order n uses buffer n modulo num_buffers; both counters only grow, and each has one writer. Order n may be written once
n - num_buffers has been filled and its bytes taken out; so who orders decides what is overwritten, and stopping to
order is all there is to cancelling.
"""

import numpy as np
import numpy.typing as npt

from kv_transfer.lease import barrier
from kv_transfer.transports.staging.doorbell import Doorbell
from protocol.arrays import Int64, UInt64

MAX_PIECES = 1024
"""Most pieces of one order."""
_PAGE = 4096
_TEXT_BYTES = 240
_ORDER_BYTES = 16 + _TEXT_BYTES + 16 * MAX_PIECES


def channel_bytes(buffer_bytes: int, num_buffers: int) -> int:
    """Returns the bytes that one channel takes, in whole pages."""
    return _PAGE + _pages(num_buffers * _ORDER_BYTES) + num_buffers * _pages(buffer_bytes)


class Channel:
    """Either side's view of a channel. Zeroed memory is a channel on which nothing was ordered."""

    def __init__(self, memory: npt.NDArray[np.uint8], buffer_bytes: int, num_buffers: int) -> None:
        """`memory` is writable, has `channel_bytes` bytes and begins with a page."""
        self.buffer_bytes, self.num_buffers = buffer_bytes, num_buffers
        self._memory = memory
        self._num_ordered = memory[0:8].view(np.uint64)
        self._num_filled = memory[64:72].view(np.uint64)
        self.orders, self.fills = Doorbell(memory[8:12].view(np.uint32)), Doorbell(memory[72:76].view(np.uint32))
        """The first is rung at each order, the second at each filled buffer."""
        self._first_buffer = _PAGE + _pages(num_buffers * _ORDER_BYTES)

    @property
    def num_ordered(self) -> int:
        """Orders that were written so far. Their pieces may be read after this."""
        count = int(self._num_ordered[0])
        barrier()
        return count

    @property
    def num_filled(self) -> int:
        """Orders that were answered so far. Their buffers and errors may be read after this."""
        count = int(self._num_filled[0])
        barrier()
        return count

    def buffer(self, number: int) -> int:
        """Returns the address of the buffer of an order."""
        return (
            int(self._memory.ctypes.data) + self._first_buffer + number % self.num_buffers * _pages(self.buffer_bytes)
        )

    def order(self, pieces: Int64) -> None:
        """Asks for pieces, int64 [n, 2] (offset, bytes), to lie one behind the other in the next order's buffer."""
        number = self.num_ordered
        header, _, table = self._order(number)
        header[:] = len(pieces), 0
        table[: len(pieces)] = pieces
        barrier()
        self._num_ordered[0] = number + 1
        self.orders.ring()

    def pieces(self, number: int) -> Int64:
        """Returns a copy of the pieces as they were ordered, int64 [n, 2]. Whoever fills them trusts no number of
        them.
        """
        header, _, table = self._order(number)
        return table[: min(int(header[0]), MAX_PIECES)].copy()

    def fill(self, error: str = "") -> None:
        """Answers the oldest open order: its bytes are in its buffer, or `error` says why not."""
        number = self.num_filled
        header, text, _ = self._order(number)
        content = error.encode()[:_TEXT_BYTES]
        text[: len(content)] = np.frombuffer(content, np.uint8)
        header[1] = len(content)
        barrier()
        self._num_filled[0] = number + 1
        self.fills.ring()

    def error(self, number: int) -> str:
        """Returns the error of an answered order, which is empty if its bytes came."""
        header, text, _ = self._order(number)
        return text[: int(header[1])].tobytes().decode(errors="replace")

    def _order(self, number: int) -> tuple[UInt64, npt.NDArray[np.uint8], Int64]:
        """Returns views of three parts of an order: number of pieces and length of the error, text of the error,
        pieces.
        """
        begin = _PAGE + number % self.num_buffers * _ORDER_BYTES
        order = self._memory[begin : begin + _ORDER_BYTES]
        return (
            order[:16].view(np.uint64),
            order[16 : 16 + _TEXT_BYTES],
            order[16 + _TEXT_BYTES :].view(np.int64).reshape(MAX_PIECES, 2),
        )


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
