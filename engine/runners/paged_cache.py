"""How a runner sees the memory of its KV cache.

Memory is block-major, [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]: all that a block has of
one KV head is one piece, so that an engine which computes some of the heads could fetch just their pieces. Kernels are
told by strides and index in the order [block, layer, K or V, KV head, position in the block, dim].
"""

import math

import torch

from engine.models.decoder import Decoder
from protocol.errors import CapacityError

LAYOUT = (0, 3, 1, 2, 4, 5)
"""The dimensions of a view, in the order in which they lie in memory. `view.permute(LAYOUT)` is contiguous."""


def block_bytes(model: Decoder, block_size: int) -> int:
    """Of one KV block, all layers, K and V."""
    return math.prod(_block_shape(model, block_size)) * model.dtype.itemsize


def paged_cache(memory: torch.Tensor, model: Decoder, block_size: int) -> torch.Tensor:
    """A view of flat uint8 `memory`: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], model dtype.

    Raises CapacityError if it is no whole number of blocks, or of fewer than 2.
    """
    size = block_bytes(model, block_size)
    if memory.numel() % size or memory.numel() < 2 * size:
        raise CapacityError(f"KV cache: {memory.numel()} bytes, expected a multiple of {size} and at least two blocks")
    return memory.view(model.dtype).view(-1, *_block_shape(model, block_size)).permute(0, 2, 3, 1, 4, 5)


def _block_shape(model: Decoder, block_size: int) -> tuple[int, ...]:
    config = model.config
    return (config.num_kv_heads, config.num_layers, 2, block_size, config.head_dim)
