"""Between the fused projection and attention: norm q and k per head where the model does, rotate both, cache k and
v. `rope_and_cache_kernel` is longer than 50 lines because a program's registers live in one body.
"""

import torch

from engine.kernels.launch import tl, triton

HEADS = 16  # per program: at head_dim 128 two 16-byte loads of each half per thread at 4 warps


@triton.jit
def columns(heads, first, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Elements [first, first + LENGTH) of a head in a tile WIDTH wide, [1, WIDTH], and which of the tile they are. The
    mask is as high as `heads` [HEADS, 1] and, where the tile is as wide as what it holds, no wider.
    """
    dims = tl.arange(0, WIDTH)[None, :]
    inside = heads
    if WIDTH > LENGTH:
        inside = heads & (dims < LENGTH)
    return first + dims, inside


@triton.jit
def put(value, q_out, place, is_query, is_cached):
    """A rotated tile goes to both; a mask says which rows each takes."""
    tl.store(q_out, value, mask=is_query)
    tl.store(place, value, mask=is_cached)


@triton.jit(
    do_not_specialize=["layer"],
    do_not_specialize_on_alignment=["positions", "slots"],  # pieces of one metadata buffer
)
def rope_and_cache_kernel(
    qkv, cos, sin, positions, slots, cache, q_out, qk_norm, layer, eps, qkv_stride, cos_stride, sin_stride,
    q_out_stride, block_stride, layer_stride, kv_stride, head_stride, offset_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token and HEADS of its heads, queries before keys before values, per program. HALF elements of a head rotate
    with the HALF behind them, what follows passes: tiles [HEADS, HALF_WIDTH] twice and [HEADS, REST_WIDTH], widths
    powers of two, or 0 for none.

    A value passes with cosine 1 and sine 0. Cache offsets are int64: a block of 8B has 2^20 elements, so block 2,048
    starts at 2^31.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_query = (heads < NUM_HEADS)[:, None]
    source = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM
    target = q_out + token * q_out_stride + heads[:, None] * HEAD_DIM
    weight = qk_norm
    if qk_norm is not None:
        weight += tl.where(heads < NUM_HEADS, 0, HEAD_DIM)[:, None]
    squares = 0.0
    if HALF_WIDTH > 0:
        dims, held = columns(inside, 0, HALF, HALF_WIDTH)
        first = tl.load(source + dims, mask=held, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + dims, mask=held, other=0.0).to(tl.float32)
        if qk_norm is not None:
            squares += tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST_WIDTH > 0:
        rest_dims, rest_held = columns(inside, 2 * HALF, HEAD_DIM - 2 * HALF, REST_WIDTH)
        rest = tl.load(source + rest_dims, mask=rest_held, other=0.0).to(tl.float32)
        if qk_norm is not None:
            squares += tl.sum(rest * rest, axis=1)
    scale = 1.0
    if qk_norm is not None:
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]

    if HALF_WIDTH > 0:
        if qk_norm is not None:
            first = normed(first, scale, weight + dims, rotates, held)
            second = normed(second, scale, weight + HALF + dims, rotates, held)
        position = tl.load(positions + token).to(tl.int64)
        cosine = tl.load(cos + position * cos_stride + dims, mask=rotates & held, other=1.0)
        sine = tl.load(sin + position * sin_stride + dims, mask=rotates & held, other=0.0)
        turned_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
        turned_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)
    if REST_WIDTH > 0 and qk_norm is not None:
        rest = normed(rest, scale, weight + rest_dims, rotates, rest_held)

    slot = tl.load(slots + token).to(tl.int64)
    row = heads - NUM_HEADS  # keys, then values
    is_value = row >= NUM_KV_HEADS
    kv_head = tl.where(is_value, row - NUM_KV_HEADS, row)
    place = (
        cache
        + slot // BLOCK_SIZE * block_stride
        + layer.to(tl.int64) * layer_stride
        + slot % BLOCK_SIZE * offset_stride
    )
    place = place + is_value[:, None] * kv_stride + kv_head[:, None] * head_stride
    is_cached = inside & (row >= 0)[:, None] & (slot >= 0)
    if HALF_WIDTH > 0:
        put(turned_first, target + dims, place + dims, is_query & held, is_cached & held)
        put(turned_second, target + HALF + dims, place + HALF + dims, is_query & held, is_cached & held)
    if REST_WIDTH > 0:
        passed = rest.to(qkv.dtype.element_ty)
        put(passed, target + rest_dims, place + rest_dims, is_query & rest_held, is_cached & rest_held)


@triton.jit
def normed(x, scale, weight, rotates, held):
    """Rows of queries and keys times `scale` and weight, values as they are."""
    by_weight = x * scale * tl.load(weight, mask=rotates & held, other=0.0).to(tl.float32)
    return tl.where(rotates, by_weight, x)


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    q_out: torch.Tensor,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotary embedding, halves apart, of the T tokens of a step; q goes to `q_out`, k and v into the cache, in the
    dtype of `qkv`.

    Computed in float32 and rounded once.

    qkv [T, (H + 2 K) * D], rows may be strided; q_out [T, H, D], contiguous within a row.
    cos, sin float32 [max positions, R / 2]: the first R of a head's D elements are rotated, the others pass; R may be
    0. positions [T] int32 or int64; qk_norm [2, D], contiguous: weights for q and for k, or None. slots [T] int32 or
    int64: block * block_size + offset; below zero nothing is cached (padding).
    cache [num_blocks, num_layers, 2, K, block_size, D], any strides but the last.
    """
    num_tokens, num_heads, head_dim = q_out.shape
    num_kv_heads, block_size, half = cache.shape[3], cache.shape[4], cos.shape[1]
    rest = head_dim - 2 * half
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
    rope_and_cache_kernel[grid](
        qkv, cos, sin, positions, slots, cache, q_out, qk_norm, layer, eps, qkv.stride(0), cos.stride(0),
        sin.stride(0), q_out.stride(0), *cache.stride()[:5],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        HALF_WIDTH=triton.next_power_of_2(half) if half else 0, REST_WIDTH=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_SIZE=block_size, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
