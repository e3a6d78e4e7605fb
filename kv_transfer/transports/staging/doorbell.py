"""A word in shared memory that one process rings and another waits for: Linux's futex, called directly.

So a thread that serves another process sleeps in the kernel until it is asked, without sockets and without looking
again and again.
"""

import ctypes
import errno
import os
import platform

import numpy as np
import numpy.typing as npt

from kv_transfer.lease import barrier
from protocol.errors import PullFailed

_WAIT, _WAKE = 0, 1  # linux/futex.h, without FUTEX_PRIVATE_FLAG: the two sides are processes
_ALL = 2**31 - 1
_CALLS = {"x86_64": 202, "aarch64": 98}
"""Numbers of the futex system call, as asm/unistd.h has them."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbell:
    """One word, uint32 [1]. One side rings; the other reads `value`, looks for work, and waits if there was none."""

    def __init__(self, word: npt.NDArray[np.uint32]) -> None:
        """Raises PullFailed on a machine whose futex we do not know."""
        if platform.machine() not in _CALLS or platform.system() != "Linux":
            raise PullFailed(f"no futex is known for {platform.system()} on {platform.machine()}")
        self._word = word
        self._address = ctypes.c_void_p(word.ctypes.data)
        self._call = ctypes.c_long(_CALLS[platform.machine()])
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def value(self) -> int:
        return int(self._word[0])

    def ring(self) -> None:
        """What was written before is visible to whoever wakes."""
        barrier()
        self._word[0] = (self.value + 1) % 2**32
        self._libc.syscall(self._call, self._address, ctypes.c_int(_WAKE), ctypes.c_int(_ALL), None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when the doorbell was rung since its value was `seen`, after `timeout_s` at most, or sooner for no
        reason.
        """
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        expected = ctypes.c_uint32(seen)
        if self._libc.syscall(self._call, self._address, ctypes.c_int(_WAIT), expected, ctypes.byref(timeout), None, 0):
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, f"futex: {os.strerror(code)}")
        barrier()
