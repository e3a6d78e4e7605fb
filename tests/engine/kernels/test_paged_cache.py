"""Where runners put keys and values in the memory of their cache: each KV head's part of a block is one piece."""

from collections.abc import Callable

import pytest
import torch

from engine.models.config import kv_layout_fields
from engine.models.decoder import Decoder
from engine.models.loading import build_model
from engine.runner import Runner
from engine.runners import torch_cpu
from engine.runners.cpu_ops import TorchOps
from engine.runners.cuda import CUDARunner
from engine.runners.paged_cache import LAYOUT, block_bytes, paged_cache
from engine.runners.torch_cpu import TorchCPURunner
from kv_transfer.layout import KVLayout
from protocol.errors import CapacityError
from tests.engine.runner_driver import make_batch
from tests.engine.tiny_llama import TINY, random_tensors

BLOCK_SIZE, NUM_BLOCKS = 16, 4


def model_with_an_empty_head() -> Decoder:
    """The keys and values of KV head 0 are zeros, those of head 1 are not."""
    tensors = random_tensors(TINY)
    for name in tensors:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name][: TINY.head_dim] = 0
    return build_model(TINY, "float32", tensors.__getitem__)


def by_torch(model: Decoder, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: TorchOps(model, cache))
    return by_numba(model, memory, monkeypatch)


def by_numba(model: Decoder, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return TorchCPURunner(model, memory, block_size=BLOCK_SIZE, num_threads=1)


def by_triton(model: Decoder, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return CUDARunner(model, memory, block_size=BLOCK_SIZE, max_model_len=64)


@pytest.mark.parametrize("runner_of", [by_torch, by_numba, by_triton])
def test_a_heads_part_of_a_block_is_one_piece_of_memory(
    runner_of: Callable[[Decoder, torch.Tensor, pytest.MonkeyPatch], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with_an_empty_head()
    layout = KVLayout(**kv_layout_fields(TINY, "float32", BLOCK_SIZE))
    assert block_bytes(model, BLOCK_SIZE) == layout.block_bytes
    memory = torch.full((NUM_BLOCKS * layout.block_elements,), torch.nan).view(torch.uint8)
    runner = runner_of(model, memory, monkeypatch)
    runner.execute(make_batch([[5] * 20], [0], [20], [[3, 1]]))
    pieces = memory.view(torch.float32).view(layout.shape(NUM_BLOCKS)).flatten(2, 3)
    assert pieces.shape == (NUM_BLOCKS, TINY.num_kv_heads, 2 * TINY.num_layers, BLOCK_SIZE, TINY.head_dim)
    written = torch.cat([pieces[3], pieces[1, :, :, :4]], dim=2)
    assert not written[0].any()
    assert written[1].isfinite().all() and written[1].count_nonzero() > 0.99 * written[1].numel()
    assert pieces[[0, 2]].isnan().all() and pieces[1, :, :, 4:].isnan().all()


def test_a_view_in_logical_order_of_what_the_layout_says() -> None:
    model, layout = model_with_an_empty_head(), KVLayout(**kv_layout_fields(TINY, "float32", BLOCK_SIZE))
    memory = torch.arange(3 * layout.block_elements, dtype=torch.float32).view(torch.uint8)
    view = paged_cache(memory, model, BLOCK_SIZE)
    assert view.shape == (3, TINY.num_layers, 2, TINY.num_kv_heads, BLOCK_SIZE, TINY.head_dim)
    assert torch.equal(view.permute(LAYOUT), memory.view(torch.float32).view(layout.shape(3)))


@pytest.mark.parametrize("blocks", [1.0, 2.5])
def test_memory_that_is_no_whole_number_of_blocks_is_refused(blocks: float) -> None:
    model = model_with_an_empty_head()
    memory = torch.zeros(int(blocks * block_bytes(model, BLOCK_SIZE)), dtype=torch.uint8)
    with pytest.raises(CapacityError, match="expected a multiple of 32768 and at least two blocks"):
        paged_cache(memory, model, BLOCK_SIZE)
