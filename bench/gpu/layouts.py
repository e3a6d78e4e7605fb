"""Compares attention over two layouts of a cache of 32 GB: block-major, which the engines use, and layer-major. Kernel
and block tables are the same, only strides differ.

In the block-major cache of an 8B model, one layer's pieces of two consecutive blocks are 2 MiB apart, and those of two
KV heads of one block 256 KiB. In a layer-major one all blocks of a layer lie side by side.
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import torch

from bench.gpu.paged import LLAMA_8B, Heads, Paged, over_cache
from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting
from bench.gpu.timing import Stopwatch

NUM_LAYERS = 32


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    watch = Stopwatch(setting)
    heads = setting.size(LLAMA_8B, Heads(num_heads=2, num_kv_heads=1, head_dim=64))
    num_layers = setting.size(NUM_LAYERS, 2)
    piece_shape = (2, heads.block_size, heads.head_dim)
    block_elements = num_layers * 2 * heads.num_kv_heads * heads.block_size * heads.head_dim
    num_blocks = setting.size(0, 12) or _affordable_bytes() // (2 * block_elements)
    memory = torch.empty(num_blocks * block_elements, dtype=setting.model_dtype, device=setting.device)
    for piece in memory.split(1 << 30):
        piece.normal_()
    caches = {
        "block-major": memory.view(num_blocks, heads.num_kv_heads, num_layers, *piece_shape).permute(0, 2, 3, 1, 4, 5),
        "layer-major": memory.view(num_layers, num_blocks, heads.num_kv_heads, *piece_shape).permute(1, 0, 3, 2, 4, 5),
    }
    rows: list[tuple[Cell, ...]] = []
    for batch, context in setting.size(((8, 1024), (64, 1024), (64, 2048), (8, 16384)), ((2, 33),)):
        times = {}
        for name, cache in caches.items():
            torch.manual_seed(setting.seed)  # gives both layouts the same block tables
            paged = over_cache(setting, heads, [1] * batch, [context] * batch, cache)
            times[name] = watch.device_s(partial(_next_layer, paged, cycle(range(num_layers))))
        block_major, layer_major = times["block-major"] * 1e6, times["layer-major"] * 1e6
        rows.append((f"decode {batch} x {context}", block_major, layer_major, block_major / layer_major))
    columns = (
        Column("one layer's attention"),
        Column("block-major", "us", measured=True),
        Column("layer-major", "us", measured=True),
        Column("ratio", measured=True),
    )
    yield Table(f"a cache of {memory.nbytes / 1e9:.3g} GB, blocks scattered over all of it", columns, rows)
    yield Note("median of 20 between CUDA events, another layer at each call, 512 MB overwritten in between")


def _next_layer(paged: Paged, layers: Iterator[int]) -> None:
    paged.run(layer=next(layers))


def _affordable_bytes() -> int:
    """32 GB, or less where only 4 GB would stay free."""
    return int(min(32e9, torch.cuda.mem_get_info()[0] - 4e9))
