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
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.row_sampling import GREEDY_BELOW
from engine.runner import Batch, StepOutput
from engine.runners.drafts import num_accepted
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
        self.copies = HostCopies(cache, num_host_blocks)
        self._last = np.zeros(0, np.int32)
        """[num_rows] the newest token of every row, for batches in which it is still pending."""

    def execute(self, batch: Batch) -> StepOutput:
        swapped_bytes, swap_seconds = self.copies.run(batch)
        if not len(batch.rows):
            return nothing_sampled(swapped_bytes, swap_seconds)
        if len(self._last) < len(batch.token_ids):  # before it is read, too: the step before may have failed
            self._last = np.resize(self._last, len(batch.token_ids))
        num_drafts = batch.num_drafts if batch.num_drafts is not None else np.zeros_like(batch.num_scheduled)
        self._write(batch)
        chosen = np.flatnonzero(batch.sample)
        targets = self._targets(batch, chosen, num_drafts[chosen])
        num_accepted = self._num_accepted(batch, chosen, num_drafts[chosen], targets)
        token_ids = np.zeros((len(batch.rows), targets.shape[1]), np.int32)
        token_ids[chosen] = targets
        counts = np.zeros(len(batch.rows), np.int32)
        counts[chosen] = num_accepted + 1
        self._last[batch.rows[chosen]] = targets[np.arange(len(chosen)), num_accepted]
        seconds = self._step_seconds(batch) if self._step_seconds else 0.0
        return StepOutput(
            token_ids=token_ids,
            counts=counts,
            seconds=seconds,
            swapped_bytes=swapped_bytes,
            swap_seconds=swap_seconds,
            logprobs=self._logprobs(batch, token_ids, counts),
        )

    def _write(self, batch: Batch) -> None:
        """Puts the KV of every scheduled token into its sequence's blocks."""
        rows = np.repeat(batch.rows, batch.num_scheduled)
        positions = np.repeat(batch.num_computed, batch.num_scheduled) + _ramps(batch.num_scheduled)
        token_ids = batch.token_ids[rows, positions]
        if batch.pending is not None:
            pending = np.repeat(batch.pending, batch.num_scheduled)
            token_ids[pending] = self._last[rows[pending]]
        self._cache[self._slots(batch, rows, positions)] = (token_ids.astype(np.int64) + 1) * (positions + 1)

    def _slots(self, batch: Batch, rows: Int32, positions: Int64) -> tuple[Int32, Int64]:
        """Index into the cache of each (row, position)."""
        block_size = self._cache.shape[1]
        return batch.block_tables[rows, positions // block_size], positions % block_size

    def _targets(self, batch: Batch, chosen: Int64, num_drafts: Int32) -> Int64:
        """What the model says after the last known token and after each draft, [len(chosen), 1 + most drafts], from the cache."""
        if not len(chosen):
            return np.zeros((0, 1), np.int64)
        rows, block_size = batch.rows[chosen], self._cache.shape[1]
        num_known = (batch.num_computed + batch.num_scheduled)[chosen].astype(np.int64) - num_drafts
        num_blocks = -(-num_known // block_size)
        last = np.cumsum(num_blocks) - 1
        entries = self._cache[batch.block_tables[np.repeat(rows, num_blocks), _ramps(num_blocks)]]
        entries[last] *= np.arange(block_size) < (num_known - (num_blocks - 1) * block_size)[:, None]
        sums = np.add.reduceat(entries.sum(axis=1), last - num_blocks + 1)[:, None]
        if most := num_drafts.max():
            positions = num_known[:, None] + np.arange(most)
            positions = np.minimum(positions, positions[:, :1] + num_drafts[:, None] - 1)  # past a row's drafts: any of its own
            sums = np.hstack([sums, sums + np.cumsum(self._cache[self._slots(batch, rows[:, None], positions)], axis=1)])
        if batch.sampling is not None:
            indices = batch.sampling.answer_bases[rows][:, None] + num_known[:, None] + np.arange(sums.shape[1])
            seeds = np.where(batch.sampling.temperatures[rows] >= GREEDY_BELOW, batch.sampling.seeds[rows] % PRIME, 0).astype(np.int64)
            sums = sums % PRIME + seeds[:, None] * (indices + 1) % PRIME
        targets: Int64 = sums % PRIME * MULTIPLIER % PRIME % self._vocab_size
        return targets

    def _logprobs(self, batch: Batch, token_ids: Int32, counts: Int32) -> dict[int, list[TokenLogprobs]]:
        if batch.sampling is None:
            return {}
        num_top = batch.sampling.num_logprobs[batch.rows]
        return {
            index: [expected_logprobs(token, int(num_top[index]), self._vocab_size) for token in token_ids[index, : counts[index]].tolist()]
            for index in np.flatnonzero((num_top >= 0) & (counts > 0)).tolist()
        }

    def _num_accepted(self, batch: Batch, chosen: Int64, num_drafts: Int32, targets: Int64) -> Int64:
        """How many drafts of each chosen sequence the model would have said itself, up to the first that it would not."""
        most = targets.shape[1] - 1
        first = (batch.num_computed + batch.num_scheduled)[chosen] - num_drafts
        offsets = np.minimum(np.arange(most), np.maximum(num_drafts - 1, 0)[:, None])
        drafts = batch.token_ids[batch.rows[chosen][:, None], first[:, None] + offsets]
        return num_accepted(drafts, num_drafts, targets)


def _ramps(counts: npt.NDArray[np.integer]) -> Int64:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ... as one int64 array."""
    ends = np.cumsum(counts, dtype=np.int64)
    ramps: Int64 = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)
    return ramps
