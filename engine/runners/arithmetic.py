"""The shipped fake: a model whose tokens and KV can be worked out by hand, and which reads every cache entry it depends on.

    kv[position] = (token_id + 1) * (position + 1)                     one int64 per token, in the paged cache
    next token   = S * 742938285 mod 2147483647 mod vocab_size         S = sum of kv over positions 0 .. last
                   with a temperature above 0: S + seed * (i + 1)      i = index of the next token in the whole answer

Example, vocab_size 32000, prompt [4, 2, 9]: kv = [5*1, 3*2, 10*3] = [5, 6, 30], S = 41, and the next token is 18627.
It lands at position 3: kv[3] = 18628*4 = 74512, S = 74553, and the token after it is 26181.

The modulus is a prime larger than any change of one entry that a wrong token can make, so a single wrong entry always changes the
first remainder; the multiplier (a full-period one for that prime) spreads it, so that it escapes the second only once in vocab_size.
"""

from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.row_sampling import GREEDY_BELOW
from engine.runner import Batch, StepOutput
from engine.runners.host_copies import HostCopies, nothing_sampled
from protocol.messages import TokenLogprobs

PRIME = 2**31 - 1
MULTIPLIER = 742938285
VOCAB_SIZE = 32_000

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def kv_layout_fields(block_size: int, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Fields of the KVLayout this runner's cache has in shared memory: one layer, one head, one int64 each for K and V."""
    model = f"arithmetic-{vocab_size}"
    return {"model": model, "dtype": "int64", "num_layers": 1, "num_kv_heads": 1, "block_size": block_size, "head_dim": 1}


def cache_view(blocks: npt.NDArray[np.uint8]) -> Int64:
    """The K half of raw blocks, uint8 [num_blocks, 16 * block_size], as int64 [num_blocks, block_size]; shares memory. V stays unused."""
    num_blocks, block_bytes = blocks.shape
    return blocks.view(np.int64).reshape(num_blocks, 2, block_bytes // 16)[:, 0]


def expected_tokens(prompt: Iterable[int], num_tokens: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0) -> list[int]:
    """The `num_tokens` tokens that a correct engine answers to `prompt`, computed without a cache. `seed`: 0 without a temperature."""
    total = num_known = 0
    for num_known, token_id in enumerate(prompt, 1):
        total += (int(token_id) + 1) * num_known
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append((total + seed * (len(answer) + 1)) * MULTIPLIER % PRIME % vocab_size)
        num_known += 1
        total += (answer[-1] + 1) * num_known
    return answer


def expected_logprobs(token_id: int, num_top: int, vocab_size: int = VOCAB_SIZE) -> TokenLogprobs:
    """What the arithmetic runner says of a token it chose: -(token_id mod 8), and one less for each token id after it."""
    chosen = -float(token_id % 8)
    top_token_ids = tuple((token_id + rank) % vocab_size for rank in range(num_top))
    return TokenLogprobs(chosen, top_token_ids, tuple(chosen - rank for rank in range(num_top)))


class ArithmeticRunner:
    """Runs the arithmetic model over a paged cache, int64 [num_blocks, block_size]; strides are free.

    Of the sampling parameters it heeds temperature (0 or not) and seed. Logprobs it invents: `expected_logprobs`.

    `step_seconds`: what a step is said to have taken; without it `StepOutput.seconds` stays 0.
    """

    def __init__(
        self,
        cache: Int64,
        vocab_size: int = VOCAB_SIZE,
        step_seconds: Callable[[Batch], float] | None = None,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._loops = _loops()
        self.copies = HostCopies(cache, num_host_blocks)
        self._last = np.zeros(0, np.int32)
        """[num_rows] the newest token of every row, for batches in which it is still pending."""

    def execute(self, batch: Batch) -> StepOutput:
        swapped_bytes, swap_seconds = self.copies.run(batch)
        size = len(batch.rows)
        if not size:
            return nothing_sampled(swapped_bytes, swap_seconds)
        if len(self._last) < len(batch.token_ids):  # before it is read, too: the step before may have failed
            self._last = np.resize(self._last, len(batch.token_ids))
        num_drafts = batch.num_drafts if batch.num_drafts is not None else np.zeros(size, np.int32)
        pending = batch.pending if batch.pending is not None else np.zeros(size, np.bool_)
        shared = self._last, batch.token_ids, batch.block_tables
        self._loops.write(self._cache, batch.rows, batch.num_computed, batch.num_scheduled, pending, *shared)
        token_ids, counts = np.zeros((size, 1 + num_drafts.max()), np.int32), np.empty(size, np.int32)
        num_known = batch.num_computed + batch.num_scheduled - num_drafts
        self._loops.sample(
            *(self._cache, batch.rows, num_known, num_drafts, batch.sample, *_noise(batch), *shared),
            *(self._vocab_size, token_ids, counts),
        )
        seconds = self._step_seconds(batch) if self._step_seconds else 0.0
        return StepOutput(
            token_ids=token_ids,
            counts=counts,
            seconds=seconds,
            swapped_bytes=swapped_bytes,
            swap_seconds=swap_seconds,
            logprobs=self._logprobs(batch, token_ids, counts),
        )

    def _logprobs(self, batch: Batch, token_ids: Int32, counts: Int32) -> dict[int, list[TokenLogprobs]]:
        if batch.sampling is None:
            return {}
        num_top = batch.sampling.num_logprobs[batch.rows]
        return {
            index: [expected_logprobs(token, int(num_top[index]), self._vocab_size) for token in token_ids[index, : counts[index]].tolist()]
            for index in np.flatnonzero((num_top >= 0) & (counts > 0)).tolist()
        }


def _noise(batch: Batch) -> tuple[Int64, Int32]:
    """(seed, index in the whole answer less position) of each sequence, [B]; a greedy one's seed is 0."""
    if batch.sampling is None:
        return np.zeros(len(batch.rows), np.int64), np.zeros(len(batch.rows), np.int32)
    sampling, rows = batch.sampling, batch.rows
    seeds = np.where(sampling.temperatures[rows] >= GREEDY_BELOW, sampling.seeds[rows] % PRIME, 0).astype(np.int64)
    return seeds, sampling.answer_bases[rows].astype(np.int32)


@cache
def _loops() -> ModuleType:
    """Imported and compiled for the first runner: most who import this module want the expected tokens alone."""
    from engine.runners import arithmetic_loops

    arithmetic_loops.compile_all()
    return arithmetic_loops
