"""Pulls that run one after the other in a thread of their own, whatever moves the bytes."""

import logging
import queue
import threading
from collections.abc import Callable

from kv_transfer.block_span import BlockSpan
from protocol.arrays import Int64
from protocol.errors import PullFailed

log = logging.getLogger(__name__)


class Pull:
    """One pull, which is queued, then copies, then is terminal. `copy` moves its bytes and says why it did not move
    all, or raises PullFailed.
    """

    def __init__(self, src_blocks: Int64, dst_blocks: Int64, span: BlockSpan, copy: Callable[["Pull"], str]) -> None:
        self.src_blocks, self.dst_blocks, self.span = src_blocks, dst_blocks, span
        self.copy = copy
        self.cancelled = threading.Event()
        self.done = False
        self.error = ""

    def poll(self) -> bool:
        return self.done

    def cancel(self) -> None:
        self.cancelled.set()


class PullThread:
    """Its verbs are `start` and `close`. `notify` is called from the thread whenever a pull is terminal."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._queue: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished: set[Pull] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="pull", daemon=True)
        self._thread.start()

    def start(self, pull: Pull) -> None:
        """Raises PullFailed once closed."""
        with self._lock:
            if self._closed:
                raise PullFailed("the transport is closed")
            self._unfinished.add(pull)
        self._queue.put(pull)

    def close(self) -> None:
        """Cancels what has not ended, then ends the thread. The second time nothing happens."""
        with self._lock:
            self._closed = True
            for pull in self._unfinished:
                pull.cancel()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (pull := self._queue.get()) is not None:
            try:
                pull.error = pull.copy(pull)
            except PullFailed as error:
                pull.error = str(error)
            except Exception as error:  # a pull that never becomes terminal would hold its blocks for ever
                log.exception("a pull failed in a way of its own")
                pull.error = f"{type(error).__name__}: {error}"
            with self._lock:
                self._unfinished.discard(pull)
            pull.done = True
            self._notify()
