"""The shipped fake: a model whose tokens and KV can be worked out by hand, and which reads every cache entry it depends on.

    kv[position] = (token_id + 1) * (position + 1)                     one int64 per token, in the paged cache
    next token   = S * 742938285 mod 2147483647 mod vocab_size         S = sum of kv over positions 0 .. last

Example, vocab_size 32000, prompt [4, 2, 9]: kv = [5*1, 3*2, 10*3] = [5, 6, 30], S = 41, and the next token is 18627.
It lands at position 3: kv[3] = 18628*4 = 74512, S = 74553, and the token after it is 26181.

The modulus is a prime larger than any change of one entry that a wrong token can make, so a single wrong entry always changes the
first remainder; the multiplier (a full-period one for that prime) spreads it, so that it escapes the second only once in vocab_size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.runner import Batch, StepOutput

PRIME = 2**31 - 1
MULTIPLIER = 742938285
VOCAB_SIZE = 32_000

Int64 = npt.NDArray[np.int64]


def kv_layout_fields(block_size: int, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Fields of the KVLayout this runner's cache has in shared memory: one layer, one head, one int64 each for K and V."""
    model = f"arithmetic-{vocab_size}"
    return {"model": model, "dtype": "int64", "num_layers": 1, "num_kv_heads": 1, "block_size": block_size, "head_dim": 1}


def cache_view(blocks: npt.NDArray[np.uint8]) -> Int64:
    """The K half of raw blocks, uint8 [num_blocks, 16 * block_size], as int64 [num_blocks, block_size]; shares memory. V stays unused."""
    num_blocks, block_bytes = blocks.shape
    return blocks.view(np.int64).reshape(num_blocks, 2, block_bytes // 16)[:, 0]


def expected_tokens(prompt: Iterable[int], num_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The `num_tokens` tokens that a correct engine answers to `prompt`, computed without a cache."""
    total = num_known = 0
    for num_known, token_id in enumerate(prompt, 1):
        total += (int(token_id) + 1) * num_known
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(total * MULTIPLIER % PRIME % vocab_size)
        num_known += 1
        total += (answer[-1] + 1) * num_known
    return answer


class ArithmeticRunner:
    """Runs the arithmetic model over a paged cache, int64 [num_blocks, block_size]; strides are free.

    `step_seconds`: what a step is said to have taken; without it `StepOutput.seconds` stays 0.
    """

    def __init__(self, cache: Int64, vocab_size: int = VOCAB_SIZE, step_seconds: Callable[[Batch], float] | None = None) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds

    def execute(self, batch: Batch) -> StepOutput:
        self._write(batch)
        token_ids = np.zeros((len(batch.rows), 1), np.int32)
        token_ids[batch.sample, 0] = self._sample(batch, np.flatnonzero(batch.sample))
        seconds = self._step_seconds(batch) if self._step_seconds else 0.0
        return StepOutput(token_ids=token_ids, counts=batch.sample.astype(np.int32), seconds=seconds)

    def _write(self, batch: Batch) -> None:
        """Puts the KV of every scheduled token into its sequence's blocks."""
        block_size = self._cache.shape[1]
        rows = np.repeat(batch.rows, batch.num_scheduled)
        positions = np.repeat(batch.num_computed, batch.num_scheduled) + _ramps(batch.num_scheduled)
        blocks = batch.block_tables[rows, positions // block_size]
        self._cache[blocks, positions % block_size] = (batch.token_ids[rows, positions].astype(np.int64) + 1) * (positions + 1)

    def _sample(self, batch: Batch, chosen: Int64) -> Int64:
        """Next tokens of the `chosen` entries of the batch, [len(chosen)], from what lies in the cache now."""
        if not len(chosen):
            return np.zeros(0, np.int64)
        block_size = self._cache.shape[1]
        num_tokens = (batch.num_computed + batch.num_scheduled)[chosen].astype(np.int64)
        num_blocks = -(-num_tokens // block_size)
        last = np.cumsum(num_blocks) - 1
        entries = self._cache[batch.block_tables[np.repeat(batch.rows[chosen], num_blocks), _ramps(num_blocks)]]
        entries[last] *= np.arange(block_size) < (num_tokens - (num_blocks - 1) * block_size)[:, None]
        totals = np.add.reduceat(entries.sum(axis=1), last - num_blocks + 1)
        tokens: Int64 = totals % PRIME * MULTIPLIER % PRIME % self._vocab_size
        return tokens


def _ramps(counts: npt.NDArray[np.integer]) -> Int64:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ... as one int64 array."""
    ends = np.cumsum(counts, dtype=np.int64)
    ramps: Int64 = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)
    return ramps
