import pytest
import torch

from engine.kernels import reference
from engine.kernels.rope_and_cache import rope_and_cache, rope_and_cache_kernel
from tests.engine.kernels.compare import DTYPES, assert_close, poisoned, row_strided

NUM_LAYERS, NUM_BLOCKS, MAX_POSITIONS = 2, 5, 96


def angles(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of theta 10,000."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angle = torch.outer(torch.arange(MAX_POSITIONS), frequency)
    return angle.cos(), angle.sin()


def compare(
    slots: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    qk_norm: bool = False,
    strided: bool = False,
    positions_dtype: torch.dtype = torch.int64,
    rotary_dim: int | None = None,
) -> None:
    """Both versions on the same inputs: equal q, equal cache, and nothing else of the cache written."""
    num_tokens, layer = len(slots), 1
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), dtype=positions_dtype)
    cos, sin = angles(head_dim if rotary_dim is None else rotary_dim)
    norm = torch.randn(2, head_dim, dtype=dtype) if qk_norm else None
    caches = [poisoned(NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
    outs = [poisoned(num_tokens, num_heads, head_dim, dtype=dtype) for _ in range(2)]
    ours = row_strided(outs[0]) if strided else outs[0]
    where = torch.tensor(slots, dtype=torch.int64)
    rope_and_cache(row_strided(qkv) if strided else qkv, cos, sin, positions, where, caches[0], layer, ours, norm, 1e-6)
    reference.rope_and_cache(qkv, cos, sin, positions, where, caches[1], layer, outs[1], norm, 1e-6)
    assert_close(ours, outs[1])
    written = ~caches[1].isnan()
    assert torch.equal(~caches[0].isnan(), written)
    assert int(written.sum()) == sum(slot >= 0 for slot in slots) * 2 * num_kv_heads * head_dim
    assert_close(caches[0][written], caches[1][written])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2), (16, 2)]
)  # GQA 1, 3, 4, 8; up to 20 heads: two tiles
@pytest.mark.parametrize("qk_norm", [False, True])
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype) -> None:
    compare(
        [16, 47, 79], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=qk_norm, dtype=dtype
    )


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(96, 96), (256, 256), (96, 72), (128, 96), (64, 16), (256, 0), (96, 0)]
)
def test_of_any_width_any_part_is_rotated(head_dim: int, rotary_dim: int, qk_norm: bool) -> None:
    slots = [16, -1, 47, 79]
    compare(slots, num_heads=6, num_kv_heads=2, head_dim=head_dim, rotary_dim=rotary_dim, qk_norm=qk_norm, strided=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_rotated_in_every_dtype(dtype: torch.dtype) -> None:
    compare([16, 47, 79], num_heads=8, num_kv_heads=4, head_dim=128, rotary_dim=96, qk_norm=True, dtype=dtype)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("slots", [[], [40], list(range(30, 35)), [63, 64, 31, 32, 17]])
def test_slots(slots: list[int], block_size: int) -> None:
    compare(slots, num_heads=4, num_kv_heads=1, head_dim=64, block_size=block_size)


def test_a_slot_below_zero_writes_nothing_but_its_query() -> None:
    compare([-1, 20, -1], num_heads=4, num_kv_heads=1, head_dim=64)


def test_strided_rows_and_int32_positions() -> None:
    compare(
        [5, 6, 40], num_heads=4, num_kv_heads=2, head_dim=64, strided=True, positions_dtype=torch.int32, qk_norm=True
    )


def test_the_first_and_the_17th_layer_are_one_kernel() -> None:
    """Specialised on its value, a layer of 1 or a multiple of 16 would compile again in the midst of a step."""
    assert rope_and_cache_kernel.kwargs["do_not_specialize"] == ["layer"]


def test_a_block_behind_2_to_the_31_elements() -> None:
    """Block 2,060 at 8B's stride. The cache is never written elsewhere, so that its 4 GB cost no memory."""
    block_id, num_kv_heads, head_dim, block_size = 2060, 8, 128, 16
    cache = torch.empty(block_id + 1, 32, 2, num_kv_heads, block_size, head_dim, dtype=torch.float16)
    assert cache.stride(0) == 1 << 20
    cache[block_id] = torch.nan
    expected = poisoned(1, 32, 2, num_kv_heads, block_size, head_dim, dtype=torch.float16)
    qkv, outs = (
        torch.randn(1, 48 * head_dim, dtype=torch.float16),
        [poisoned(1, 32, head_dim, dtype=torch.float16) for _ in range(2)],
    )
    cos, sin = angles(head_dim)
    position = torch.tensor([7])
    rope_and_cache(
        qkv, cos, sin, position, torch.tensor([block_id * block_size + 9], dtype=torch.int32), cache, 31, outs[0]
    )
    reference.rope_and_cache(qkv, cos, sin, position, torch.tensor([9]), expected, 31, outs[1])
    assert_close(outs[0], outs[1])
    written = ~expected[0].isnan()
    assert torch.equal(~cache[block_id].isnan(), written)
    assert_close(cache[block_id][written], expected[0][written])
