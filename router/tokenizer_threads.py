"""The threads in which requests are parsed and tokenised, beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protocol.errors import Overloaded

RETRY_S = 1.0
"""What an Overloaded tells its client to wait."""

T = TypeVar("T")


class TokenizerThreads:
    """At most `max_works` are under way, in `num_threads` threads."""

    def __init__(self, num_threads: int, max_works: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._num_works, self._max_works = 0, max_works

    async def run(self, work: Callable[[], T]) -> T:
        """Raises what `work` raises, or Overloaded if there is too much to do."""
        if self._num_works >= self._max_works:
            raise Overloaded(f"{self._num_works} requests wait for tokenisation", retry_after_s=RETRY_S)
        self._num_works += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_works -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
