"""The host side of swapped KV, and the copies a batch asks for."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.runner import Batch, StepOutput
from protocol.block_runs import merged_runs
from protocol.clock import Clock


def nothing_sampled(swapped_bytes: int, swap_seconds: float) -> StepOutput:
    """Of a batch without sequences."""
    return StepOutput(
        token_ids=np.zeros((0, 1), np.int32),
        counts=np.zeros(0, np.int32),
        seconds=swap_seconds,
        swapped_bytes=swapped_bytes,
        swap_seconds=swap_seconds,
    )


class HostCopies:
    """`cache`: [num_blocks, ...], the runner's own; the host blocks have the same shape and type. Touched only when a
    batch says so.
    """

    def __init__(self, cache: npt.NDArray[Any], num_host_blocks: int, clock: Clock = time.perf_counter) -> None:
        self._cache = cache
        self.host = np.empty((num_host_blocks, *cache.shape[1:]), cache.dtype)
        """[num_host_blocks, ...]"""
        self._clock = clock

    def run(self, batch: Batch) -> tuple[int, float]:
        """Copies out, then in, before anything of the batch is written. Returns (bytes, seconds), each byte counted
        once.
        """
        if batch.swap_out is None and batch.swap_in is None:
            return 0, 0.0
        started_at = self._clock()
        num_blocks = 0
        for pairs, source, destination in (
            (batch.swap_out, self._cache, self.host),
            (batch.swap_in, self.host, self._cache),
        ):
            if pairs is not None:
                num_blocks += len(pairs)
                for src, dst, length in merged_runs(*pairs.T.astype(np.int64)).tolist():
                    destination[dst : dst + length] = source[src : src + length]
        return num_blocks * self._cache[:1].nbytes, self._clock() - started_at
