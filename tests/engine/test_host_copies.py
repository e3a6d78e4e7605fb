"""Swapped KV in the real CPU runner: out, overwritten, back into other blocks, and on as if nothing had been."""

import numpy as np
import torch

from engine.models.loading import build_model
from engine.runner import Batch
from engine.runners.torch_cpu import TorchCPURunner
from tests.engine.runner_driver import make_batch
from tests.engine.test_torch_runner import BLOCK_SIZE, cache_for
from tests.engine.tiny_llama import TINY, random_tensors

PROMPT = list(range(40))


def first_and_second(runner: TorchCPURunner, after: list[int]) -> list[int]:
    """Two tokens, with the KV of the second read through the block table `after`."""
    first = int(runner.execute(make_batch([PROMPT], [0], [40], [[1, 2, 3]])).token_ids[0, 0])
    if after != [1, 2, 3]:
        other = make_batch([list(range(50, 98))[:47]], [0], [47], [[1, 2, 3]])
        other.swap_out = np.array([[1, 4], [2, 0], [3, 2]], np.int32)
        output = runner.execute(other)
        assert output.swapped_bytes == 3 * runner.cache[0].nbytes and 0 < output.swap_seconds < output.seconds
    batch = make_batch([[*PROMPT, first]], [40], [1], [after])
    if after != [1, 2, 3]:
        batch.swap_in = np.array([[4, after[0]], [0, after[1]], [2, after[2]]], np.int32)
    return [first, int(runner.execute(batch).token_ids[0, 0])]


def test_kv_comes_back_as_it_was() -> None:
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    runner = TorchCPURunner(model, cache_for(model), block_size=BLOCK_SIZE, num_threads=1, num_host_blocks=5)
    straight = first_and_second(runner, [1, 2, 3])
    kept = runner.cache[1:4].clone()
    assert first_and_second(runner, [9, 1, 6]) == straight
    assert torch.equal(runner.cache[[9, 1]], kept[:2])


def test_a_batch_without_sequences_only_copies() -> None:
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    runner = TorchCPURunner(model, cache_for(model), block_size=BLOCK_SIZE, num_threads=1, num_host_blocks=5)
    nothing = np.zeros(0, np.int32)
    table = np.zeros((1, 4), np.int32)
    batch = Batch(
        step=0,
        rows=nothing,
        num_scheduled=nothing,
        num_computed=nothing,
        sample=nothing > 0,
        token_ids=table,
        block_tables=table,
        swap_out=np.array([[1, 0]], np.int32),
    )
    output = runner.execute(batch)
    assert (len(output.counts), output.swapped_bytes) == (0, runner.cache[0].nbytes)
