"""The CPU runner against a dense forward: chunk edges, prefix-cached starts, mixed batches, both kinds of operations
between linears.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.config import Dtype, ModelConfig
from engine.models.decoder import Decoder
from engine.models.loading import TORCH_DTYPES, build_model
from engine.runners import torch_cpu
from engine.runners.cpu_ops import TorchOps
from engine.runners.step_plan import plan_step
from engine.runners.torch_cpu import TorchCPURunner
from protocol.errors import CapacityError
from tests.engine.runner_driver import generate, make_batch
from tests.engine.tiny_llama import TINY, dense_logits, random_tensors

BLOCK_SIZE, NUM_BLOCKS = 16, 64
MakeRunner = Callable[[Decoder], TorchCPURunner]


def cache_for(model: Decoder, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """A cache full of NaN: reading one slot that was not written shows."""
    config = model.config
    elements = num_blocks * config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim
    return torch.full((elements,), float("nan"), dtype=model.dtype).view(torch.uint8)


@pytest.fixture(params=["torch", "compiled"])
def make_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: TorchOps(model, cache))
    return lambda model: TorchCPURunner(model, cache_for(model), block_size=BLOCK_SIZE, num_threads=1)


def tokens(seed: int, length: int, config: ModelConfig = TINY) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, config.vocab_size, length)]


def tables(*lengths: int) -> list[list[int]]:
    """Block tables for sequences of these lengths, out of scattered blocks; block 0 stays unused."""
    free = [int(b) for b in np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS))]
    return [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def run(
    runner: TorchCPURunner, ids: list[list[int]], computed: list[int], scheduled: list[int], blocks: list[list[int]]
) -> torch.Tensor | None:
    with torch.inference_mode():
        logits = runner.forward(plan_step(make_batch(ids, computed, scheduled, blocks), BLOCK_SIZE))
    return None if logits is None else logits.double()


@pytest.mark.parametrize("chunks", [[150], [1, 149], [16, 16, 118], [15, 1, 1, 16, 17, 100], [97, 53], [33, 117]])
def test_chunks_of_any_size_give_the_logits_of_a_dense_forward(make_runner: MakeRunner, chunks: list[int]) -> None:
    weights = random_tensors(TINY)
    runner = make_runner(build_model(TINY, "float32", weights.__getitem__))
    ids, blocks = tokens(0, 150), tables(150)
    done, logits = 0, None
    for chunk in chunks:
        assert logits is None, "only the last chunk reaches the last known token"
        logits = run(runner, [ids], [done], [chunk], blocks)
        done += chunk
    assert logits is not None
    torch.testing.assert_close(logits[0], dense_logits(TINY, weights, ids)[-1], rtol=0, atol=2e-4)


def test_a_batch_mixes_decodes_whole_prompts_and_a_prefix_cached_start(make_runner: MakeRunner) -> None:
    weights = random_tensors(TINY)
    runner = make_runner(build_model(TINY, "float32", weights.__getitem__))
    ids = [tokens(1, 130), tokens(2, 40), tokens(3, 17), tokens(4, 90), tokens(5, 1)]
    blocks = tables(*[len(sequence) for sequence in ids])
    ids[3][:64] = ids[0][:64]
    blocks[3][:4] = blocks[0][:4]
    run(runner, ids, [0] * 5, [129, 0, 16, 0, 0], blocks)
    computed = [129, 0, 16, 64, 0]
    logits = run(runner, ids, computed, [len(sequence) - c for sequence, c in zip(ids, computed, strict=True)], blocks)
    assert logits is not None
    for row, sequence in enumerate(ids):
        torch.testing.assert_close(logits[row], dense_logits(TINY, weights, sequence)[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 1, "head_dim": 48},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_other_shapes(make_runner: MakeRunner, change: dict[str, Any]) -> None:
    config = replace(TINY, **change)
    weights = random_tensors(config)
    runner = make_runner(build_model(config, "float32", weights.__getitem__))
    ids, blocks = tokens(6, 50), tables(50)
    run(runner, [ids], [0], [49], blocks)
    logits = run(runner, [ids], [49], [1], blocks)
    assert logits is not None
    torch.testing.assert_close(logits[0], dense_logits(config, weights, ids)[-1], rtol=0, atol=2e-4)


def test_a_block_size_that_fills_no_vector_is_served_too() -> None:
    weights = random_tensors(TINY)
    model = build_model(TINY, "float32", weights.__getitem__)
    runner = TorchCPURunner(model, cache_for(model, block_size=4, num_blocks=20), block_size=4, num_threads=1)
    ids = tokens(7, 30)
    answer = generate(runner, [ids], 2, budget=7, block_size=4, num_blocks=20)[0]
    assert answer[0] == int(dense_logits(TINY, weights, ids)[-1].argmax())
    assert answer[1] == int(dense_logits(TINY, weights, [*ids, answer[0]])[-1].argmax())


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.04), ("float16", 0.005)])
def test_16_bits_stay_close(make_runner: MakeRunner, dtype: Dtype, tolerance: float) -> None:
    weights = random_tensors(TINY, TORCH_DTYPES[dtype])
    runner = make_runner(build_model(TINY, dtype, weights.__getitem__))
    ids, blocks = tokens(8, 120), tables(120)
    run(runner, [ids], [0], [119], blocks)
    logits = run(runner, [ids], [119], [1], blocks)
    assert logits is not None
    expected = dense_logits(TINY, weights, ids)[-1]
    assert float((logits[0] - expected).abs().max()) < tolerance * float(expected.abs().max())
    assert bool((logits.to(TORCH_DTYPES[dtype]) != logits).any()), "the head rounds nothing"


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "TorchOps"), ("bfloat16", "NumbaOps")])
def test_a_cpu_that_cannot_convert_float16_computes_it_in_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: Dtype, kind: str
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("engine.runners.cpu_elements.HAS_HALF", False)
    model = build_model(TINY, dtype, random_tensors(TINY, TORCH_DTYPES[dtype]).__getitem__)
    runner = TorchCPURunner(model, cache_for(model), block_size=BLOCK_SIZE, num_threads=1)
    assert type(runner._ops).__name__ == kind


def test_output_has_counts_only_where_sampled(make_runner: MakeRunner) -> None:
    weights = random_tensors(TINY)
    runner = make_runner(build_model(TINY, "float32", weights.__getitem__))
    ids, blocks = [tokens(9, 20), tokens(10, 20)], tables(20, 20)
    output = runner.execute(make_batch(ids, [0, 0], [10, 20], blocks))
    assert output.counts.tolist() == [0, 1]
    assert output.token_ids[1, 0] == int(dense_logits(TINY, weights, ids[1])[-1].argmax())


def test_steps_write_only_their_own_slots(make_runner: MakeRunner) -> None:
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    runner = make_runner(model)
    runner.execute(make_batch([tokens(11, 20)], [0], [20], [[5, 9]]))
    written = ~runner.cache.isnan().all(dim=-1)  # [num_blocks, num_layers, 2, num_kv_heads, block_size]
    assert written[5].all() and written[9, ..., :4].all()
    assert int(written.sum()) == 20 * TINY.num_layers * 2 * TINY.num_kv_heads


def test_a_cache_of_no_whole_blocks_is_refused() -> None:
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    with pytest.raises(CapacityError, match="KV cache: 100 bytes, expected a multiple of"):
        TorchCPURunner(model, torch.zeros(100, dtype=torch.uint8), block_size=16, num_threads=1)
