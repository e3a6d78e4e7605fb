"""How fast this machine reads memory and multiplies in float32, and the time that linears need at least at that speed.

What is measured takes turns and is repeated, and the fastest repeat of each part counts, because other programs may use
the machine too. A GB is 1e9 bytes.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig

READ_BYTES, MATMUL = 256 << 20, 1024
"""Bytes that are summed, and the sides of the matrices that are multiplied, to measure the machine."""
MOST_ROUNDS, ROUNDS_S = 60, 6.0
"""Rounds of one measurement, and about the time for all of them."""


@dataclass(frozen=True, slots=True)
class Machine:
    threads: int
    read_gb_s: float
    float32_gflop_s: float

    def floor_s(self, weights: int, rows: int) -> float:
        """Seconds in which it reads so many bf16 weights and multiplies them with so many rows."""
        return max(2 * weights / self.read_gb_s / 1e9, self.multiplied_s(weights, rows))

    def multiplied_s(self, weights: int, rows: int) -> float:
        return 2 * weights * rows / self.float32_gflop_s / 1e9


class Fastest:
    """Calls in parts; the fastest repeat of each part counts."""

    def __init__(self, parts: Iterable[Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._parts, self._clock = list(parts), clock
        self._seconds = [math.inf] * len(self._parts)

    @property
    def seconds(self) -> float:
        return sum(self._seconds)

    def repeat(self) -> None:
        for i, part in enumerate(self._parts):
            start = self._clock()
            part()
            self._seconds[i] = min(self._seconds[i], self._clock() - start)


class Speeds:
    """What is measured of the machine itself, in turn with all else."""

    def __init__(self) -> None:
        numbers, left, right = torch.ones(READ_BYTES // 4), torch.randn(MATMUL, MATMUL), torch.randn(MATMUL, MATMUL)
        product = torch.empty(MATMUL, MATMUL)
        self._read, self._multiply = Fastest([numbers.sum]), Fastest([lambda: torch.mm(left, right, out=product)])
        self.parts = [self._read, self._multiply]

    def machine(self) -> Machine:
        """By the fastest repeats so far."""
        return Machine(
            torch.get_num_threads(),
            READ_BYTES / self._read.seconds / 1e9,
            2 * MATMUL**3 / self._multiply.seconds / 1e9,
        )


def take_turns(measured: Sequence[Fastest], rounds_s: float) -> None:
    """Repeats each, in turn, for about `rounds_s` and at most MOST_ROUNDS times. What takes a third of that time is
    done once, and the others at least three times.
    """
    start = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        for each in measured:
            if not turn or each.seconds < rounds_s / 3:
                each.repeat()
        if turn >= 2 and time.perf_counter() - start > rounds_s:
            return


def layer_weights(config: ModelConfig) -> int:
    """Weights of all linears of the layers."""
    heads = config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (qkv + heads + 3 * config.intermediate_size)
