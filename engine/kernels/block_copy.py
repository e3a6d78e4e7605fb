"""KV blocks by their ids: out of a cache, into a cache, from a peer's cache into ours. For pieces too small for copy
engines. A cache given as a view of some of its columns, such as cache[:, 64:128], stands for that part of each block.
"""

import torch

from engine.kernels.launch import tl, triton

CHUNK = 2048  # elements per program: 16 KB of int64, eight 16-byte loads in flight per thread at 4 warps


@triton.jit(do_not_specialize_on_alignment=["src_ids", "dst_ids"])  # any rows of a transfer's ids
def copy_blocks_kernel(src, src_ids, dst, dst_ids, width, src_stride, dst_stride, CHUNK: tl.constexpr):
    """One chunk of one block per program. Without ids the i-th block is row i. Ids are widened before they meet a
    stride.
    """
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    src_row = index if src_ids is None else tl.load(src_ids + index).to(tl.int64)
    dst_row = index if dst_ids is None else tl.load(dst_ids + index).to(tl.int64)
    inside = columns < width
    value = tl.load(src + src_row * src_stride + columns, mask=inside)
    tl.store(dst + dst_row * dst_stride + columns, value, mask=inside)


def gather_blocks(cache_flat: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = cache_flat[block_ids[i]]. cache_flat [num_blocks, width], out [n, width], block_ids [n] int32 or
    int64.
    """
    _launch(cache_flat, block_ids, out, None, len(block_ids))


def scatter_blocks(buffer: torch.Tensor, cache_flat: torch.Tensor, block_ids: torch.Tensor) -> None:
    """cache_flat[block_ids[i]] = buffer[i]; ids without repeats. Shapes as in `gather_blocks`."""
    _launch(buffer, None, cache_flat, block_ids, len(block_ids))


def pull_blocks(src_flat: torch.Tensor, src_ids: torch.Tensor, dst_flat: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """dst_flat[dst_ids[i]] = src_flat[src_ids[i]]; dst_ids without repeats. `src_flat` may lie in a peer's memory that
    is mapped here.
    """
    _launch(src_flat, src_ids, dst_flat, dst_ids, len(src_ids))


def warm_up_pulls(cache_flat: torch.Tensor) -> None:
    """Compiles what `pull_blocks` launches between two caches of this layout, by copying block 0, which is never used,
    to itself.
    """
    first = torch.zeros(1, dtype=torch.int64, device=cache_flat.device)
    pull_blocks(cache_flat, first, cache_flat, first)


def _launch(
    src: torch.Tensor, src_ids: torch.Tensor | None, dst: torch.Tensor, dst_ids: torch.Tensor | None, num_blocks: int
) -> None:
    src, dst = _widen(src, dst)
    width = src.shape[1]
    grid = (num_blocks, triton.cdiv(width, CHUNK))
    copy_blocks_kernel[grid](src, src_ids, dst, dst_ids, width, src.stride(0), dst.stride(0), CHUNK=CHUNK, num_warps=4)


def _widen(*flat: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes as int64 where every row begins and ends on 8 bytes, else as they are."""
    edges = [edge * t.element_size() for t in flat for edge in (t.shape[1], t.stride(0), t.storage_offset())]
    return [t.view(torch.int64) for t in flat] if all(edge % 8 == 0 for edge in edges) else list(flat)
