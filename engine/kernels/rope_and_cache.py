"""Between the fused projection and attention: norm q and k per head where the model does, rotate both, cache k and
v.
"""

import torch

from engine.kernels.launch import tl, triton

HEADS = 16  # per program: at head_dim 128 two 16-byte loads of each half per thread at 4 warps


@triton.jit(do_not_specialize=["layer"])
def rope_and_cache_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    cache,
    q_out,
    qk_norm,
    layer,
    eps,
    qkv_stride,
    cos_stride,
    sin_stride,
    q_out_stride,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    offset_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token and HEADS of its heads, queries before keys before values, per program; tiles are [HEADS, HALF].

    A value passes with cosine 1 and sine 0. Cache offsets are int64: a block of 8B has 2^20 elements, so block 2,048
    starts at 2^31.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)[None, :]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    source = qkv + token * qkv_stride + heads[:, None] * (2 * HALF) + dims
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    if qk_norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight = qk_norm + tl.where(heads < NUM_HEADS, 0, 2 * HALF)[:, None] + dims
        normed_first = first * scale * tl.load(weight, mask=rotates, other=0.0).to(tl.float32)
        normed_second = second * scale * tl.load(weight + HALF, mask=rotates, other=0.0).to(tl.float32)
        first = tl.where(rotates, normed_first, first)
        second = tl.where(rotates, normed_second, second)

    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cos + position * cos_stride + dims, mask=rotates, other=1.0)
    sine = tl.load(sin + position * sin_stride + dims, mask=rotates, other=0.0)
    turned_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)

    is_query = (heads < NUM_HEADS)[:, None]
    target = q_out + token * q_out_stride + heads[:, None] * (2 * HALF) + dims
    tl.store(target, turned_first, mask=is_query)
    tl.store(target + HALF, turned_second, mask=is_query)

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
    place = place + is_value[:, None] * kv_stride + kv_head[:, None] * head_stride + dims
    is_cached = inside & (row >= 0)[:, None] & (slot >= 0)
    tl.store(place, turned_first, mask=is_cached)
    tl.store(place + HALF, turned_second, mask=is_cached)


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

    qkv [T, (H + 2 K) * D], rows may be strided; q_out [T, H, D], contiguous within a row; D a power of two.
    cos, sin float32 [max positions, D / 2]; positions [T] int32 or int64; qk_norm [2, D], contiguous: weights for q and
    for k, or None. slots [T] int32 or int64: block * block_size + offset; below zero nothing is cached (padding).
    cache [num_blocks, num_layers, 2, K, block_size, D], any strides but the last.
    """
    num_tokens, num_heads, head_dim = q_out.shape
    num_kv_heads, block_size = cache.shape[3], cache.shape[4]
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
    rope_and_cache_kernel[grid](
        qkv,
        cos,
        sin,
        positions,
        slots,
        cache,
        q_out,
        qk_norm,
        layer,
        eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        q_out.stride(0),
        *cache.stride()[:5],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        HEADS=HEADS,
        num_warps=4,
    )
