import pytest
import torch

from engine.kernels import reference
from engine.kernels.block_copy import CHUNK, gather_blocks, pull_blocks, scatter_blocks

NUM_BLOCKS = 6


def caches(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches with different bytes in every place."""
    flat = torch.arange(2 * NUM_BLOCKS * width).to(dtype).view(2, NUM_BLOCKS, width)
    return flat[0], flat[1]


WIDTHS = [
    (64, torch.float16),
    (40, torch.uint8),
    (37, torch.uint8),
    (8 * CHUNK + 8, torch.uint8),
    (CHUNK + 1, torch.int64),
]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[], [4], [5, 0, 3]])
@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_gather_scatter_pull(width: int, dtype: torch.dtype, ids: list[int], id_dtype: torch.dtype) -> None:
    cache, other = caches(width, dtype)
    block_ids = torch.tensor(ids, dtype=id_dtype)

    buffers = [torch.full((len(ids), width), 77).to(dtype) for _ in range(2)]
    gather_blocks(cache, block_ids, buffers[0])
    reference.gather_blocks(cache, block_ids, buffers[1])
    assert torch.equal(buffers[0], buffers[1])

    targets = [other.clone() for _ in range(2)]
    scatter_blocks(buffers[0], targets[0], block_ids)
    reference.scatter_blocks(buffers[1], targets[1], block_ids)
    assert torch.equal(targets[0], targets[1])

    pulled, to = [other.clone() for _ in range(2)], torch.tensor([1, 2, 4][: len(ids)], dtype=id_dtype)
    pull_blocks(cache, block_ids, pulled[0], to)
    reference.pull_blocks(cache, block_ids, pulled[1], to)
    assert torch.equal(pulled[0], pulled[1])


def test_rows_that_do_not_lie_on_8_bytes() -> None:
    """Row bytes divide by 8, their stride does not: copied as they are."""
    wide, _ = caches(45, torch.uint8)
    out = torch.zeros(2, 40, dtype=torch.uint8)
    gather_blocks(wide[:, :40], torch.tensor([1, 5]), out)
    assert torch.equal(out, wide[[1, 5], :40])


@pytest.mark.parametrize(("src_from", "dst_from", "width"), [(64, 8, 128), (0, 200, 56), (13, 6, 99)])
def test_a_part_of_each_block_and_nothing_beside_it(src_from: int, dst_from: int, width: int) -> None:
    """Between caches whose blocks have different sizes."""
    wide, _ = caches(512, torch.uint8)
    target = torch.full((NUM_BLOCKS, 256), 77, dtype=torch.uint8)
    expected = target.clone()
    src, dst = torch.tensor([5, 1, 2]), torch.tensor([0, 4, 3])
    expected[dst, dst_from : dst_from + width] = wide[src, src_from : src_from + width]
    pull_blocks(wide[:, src_from : src_from + width], src, target[:, dst_from : dst_from + width], dst)
    assert torch.equal(target, expected)


def test_a_block_behind_2_to_the_31_elements() -> None:
    """Block 2,060 of one that is a byte longer than 8B's stride in elements; untouched, its 2 GB cost no memory."""
    block_id = 2060
    cache = torch.empty(block_id + 1, (1 << 20) + 1, dtype=torch.uint8)[:, :40]
    cache[block_id] = torch.arange(40, dtype=torch.uint8)
    out = torch.zeros(1, 40, dtype=torch.uint8)
    gather_blocks(cache, torch.tensor([block_id], dtype=torch.int32), out)
    assert torch.equal(out[0], cache[block_id])
    scatter_blocks(out + 100, cache, torch.tensor([block_id], dtype=torch.int32))
    assert torch.equal(cache[block_id], out[0] + 100)
