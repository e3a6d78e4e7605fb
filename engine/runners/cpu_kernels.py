"""Compiled CPU kernels: norms, silu, rotary embedding, attention over the paged cache. numba; one set per (head_dim,
group, block_size).

Arrays of bf16 are passed as uint16, of float32 as they are; all sums are float32. Attention works in base 2: q is
scaled by log2(e) / sqrt(head_dim) when it is rotated. Nothing here allocates per token; scratch comes from the caller,
one row per bin (thread).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic, overload, register_jitable

from engine.kernel_cache import compiled, variant
from engine.runners import cpu_simd
from engine.runners.cpu_simd import (
    WIDTH,
    make_dot_keys,
    make_prefetch,
    make_product,
    make_transpose_keys,
    make_weigh_values,
    make_widen_row,
)

SOURCES = (__file__, cpu_simd.__file__)

KEY_TILE = 128
"""Keys handled at a time by a prompt tile: scores and the tile's K and V stay in the L2 cache."""
AHEAD = 4
"""Blocks between a key block's prefetch and its use."""
TILE_ROWS = 96
"""Query rows (tokens x heads of a group) of a prompt tile."""

# 2 ** f on [0, 1] by Chebyshev interpolation of degree 6, lowest power first; relative error 2.5e-9
E0, E1, E2, E3, E4, E5, E6 = (
    np.float32(c)
    for c in (
        1.0000000025,
        0.6931469327588,
        0.2402304544125,
        0.05548063019600,
        0.009684186311644,
        0.001239133182310,
        0.0002186578482386,
    )
)
LOG2E = np.float32(1.4426950408889634)


@intrinsic
def bits_to_float(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def float_to_bits(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


def load(x: Any) -> Any:
    """A stored element as float32."""


@overload(load, inline="always")
def _load(x: Any) -> Any:
    if x == types.uint16:

        def load_bf16(x: Any) -> Any:
            return bits_to_float(np.uint32(x) << np.uint32(16))

        return load_bf16

    def load_float(x: Any) -> Any:
        return x

    return load_float


def store(array: Any, row: Any, column: Any, value: Any) -> Any:
    """array[row, column] = value, rounded to nearest even if it is bf16."""


@overload(store, inline="always")
def _store(array: Any, row: Any, column: Any, value: Any) -> Any:
    if array.dtype == types.uint16:

        def store_bf16(array: Any, row: Any, column: Any, value: Any) -> Any:
            bits = float_to_bits(np.float32(value))
            array[row, column] = np.uint16(
                (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )

        return store_bf16

    def store_float(array: Any, row: Any, column: Any, value: Any) -> Any:
        array[row, column] = value

    return store_float


@register_jitable(inline="always")
def exp2(x: Any) -> Any:
    """2 ** x in float32 for x <= 127; 2 ** -126 for anything smaller than -126."""
    x = max(x, np.float32(-126.0))
    whole = np.floor(x)
    f = x - whole
    fraction = E0 + f * (E1 + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
    return fraction * bits_to_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@register_jitable
def softmax_step(scores: Any, n: int, peak: Any, total: Any, acc: Any, row: int) -> None:
    """One more tile of n scores for one query row: turns them into weights, rescales what was summed so far to the new
    peak.
    """
    highest = peak[row]
    for j in range(n):
        highest = max(highest, scores[j])
    scale = exp2(peak[row] - highest)
    added = np.float32(0.0)
    for j in range(n):
        weight = exp2(scores[j] - highest)
        scores[j] = weight
        added += weight
    peak[row] = highest
    total[row] = total[row] * scale + added
    for d in range(acc.shape[1]):
        acc[row, d] *= scale


def supports(head_dim: int, block_size: int) -> bool:
    """Whether these shapes fill whole vectors."""
    return head_dim % WIDTH == 0 and block_size % WIDTH == 0 and KEY_TILE % block_size == 0


@functools.cache
def make_attention(head_dim: int, group: int, block_size: int, bf16: bool) -> Callable[..., None]:
    """Attention for `group` query heads per KV head; see `attention` inside for its arguments."""
    D, G, BS, HALF, BYTES = head_dim, group, block_size, head_dim // 2, 2 if bf16 else 4
    R, key = tile_rows(group), f"{head_dim}_{group}_{block_size}_{'bf16' if bf16 else 'f32'}"
    SCALE, LOW = np.float32(1.4426950408889634 / head_dim**0.5), np.float32(-1e30)
    COLUMNS = 32 if head_dim % 32 == 0 else 16
    dot_keys, NUM_DOT = make_dot_keys(D, G, KEY_TILE, bf16)
    weigh_block, weigh_one = (make_weigh_values(D, G, KEY_TILE, bf16, num) for num in (16, 1))
    transpose_keys, widen_row = make_transpose_keys(D, KEY_TILE, bf16), make_widen_row(D, bf16)
    prefetch = make_prefetch(BS * D * BYTES)
    score_product, value_product = make_product(32, D, KEY_TILE, KEY_TILE), make_product(COLUMNS, KEY_TILE, D, D)

    def part(function: Callable[..., Any]) -> Any:
        return register_jitable(variant(function, key))

    @part
    def rotate(x: Any, row: int, column: int, cos: Any, sin: Any, position: int, d: int) -> Any:
        """Elements d and d + HALF of one head, rotated."""
        first, second = load(x[row, column + d]), load(x[row, column + HALF + d])
        c, s = cos[position, d], sin[position, d]
        return first * c - second * s, second * c + first * s

    @part
    def place_token(
        t: int, qkv: Any, q: Any, positions: Any, slots: Any, cos: Any, sin: Any, cache: Any, layer: int
    ) -> None:
        """Rotates and scales one token's q into float32, writes its k (rotated) and v into the cache."""
        num_kv_heads = cache.shape[3]
        num_heads, position, slot = num_kv_heads * G, positions[t], slots[t]
        block, offset = slot // BS, slot % BS
        for head in range(num_heads):
            for d in range(HALF):
                low, high = rotate(qkv, t, head * D, cos, sin, position, d)
                q[t, head * D + d] = low * SCALE
                q[t, head * D + HALF + d] = high * SCALE
        for head in range(num_kv_heads):
            keys, values = cache[block, layer, 0, head], cache[block, layer, 1, head]
            column = (num_heads + head) * D
            for d in range(HALF):
                low, high = rotate(qkv, t, column, cos, sin, position, d)
                store(keys, offset, d, low)
                store(keys, offset, HALF + d, high)
            column += num_kv_heads * D
            for d in range(D):
                values[offset, d] = qkv[t, column + d]

    @part
    def attend_token(
        t: int,
        head: int,
        table: Any,
        context: int,
        next_head: int,
        next_table: Any,
        q: Any,
        out: Any,
        cache: Any,
        layer: int,
        work: Any,
    ) -> None:
        """One token's group of query heads over `context` keys, straight from the blocks."""
        scores, acc, peak, total, _, _, _ = scratch(work)
        acc[:G] = np.float32(0.0)
        peak[:G] = LOW
        total[:G] = np.float32(0.0)
        queries = q.ctypes.data + (t * q.shape[1] + head * G * D) * 4
        num_kv_heads = cache.shape[3]
        head_bytes = BS * D * BYTES
        layer_bytes = 2 * num_kv_heads * head_bytes
        block_bytes = cache.shape[1] * layer_bytes
        base = cache.ctypes.data + layer * layer_bytes + head * head_bytes
        next_base = base + (next_head - head) * head_bytes
        last = (context - 1) // BS
        for first in range(0, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            for start in range(0, n, BS):
                index = (first + start) // BS
                keys = base + np.int64(table[index]) * block_bytes
                prefetch(keys + num_kv_heads * head_bytes, 0)
                if index + AHEAD <= last:
                    prefetch(base + np.int64(table[index + AHEAD]) * block_bytes, 0)
                else:
                    prefetch(
                        next_base + np.int64(next_table[min(index + AHEAD - last, len(next_table)) - 1]) * block_bytes,
                        0,
                    )
                for j in range(0, min(BS, n - start), NUM_DOT):
                    dot_keys(queries, keys + j * D * BYTES, scores.ctypes.data + (start + j) * 4)
            for g in range(G):
                softmax_step(scores[g], n, peak, total, acc, g)
            for start in range(0, n, BS):
                values = base + np.int64(table[(first + start) // BS]) * block_bytes + num_kv_heads * head_bytes
                here = min(BS, n - start)
                whole = here - here % 16
                for j in range(0, whole, 16):
                    weigh_block(scores.ctypes.data + (start + j) * 4, values + j * D * BYTES, acc.ctypes.data)
                for j in range(whole, here):
                    weigh_one(scores.ctypes.data + (start + j) * 4, values + j * D * BYTES, acc.ctypes.data)
        for g in range(G):
            inverse = np.float32(1.0) / total[g]
            for d in range(D):
                store(out, t, (head * G + g) * D + d, acc[g, d] * inverse)

    @part
    def attend_tile(
        t0: int, num: int, head: int, table: Any, position: int, q: Any, out: Any, cache: Any, layer: int, work: Any
    ) -> None:
        """Tokens t0 .. t0 + num - 1, the first at `position`, causal: K and V tiles widened to float32 once for all
        rows.
        """
        scores, acc, peak, total, queries, keys_t, values = scratch(work)
        rows = num * G
        whole = (rows + 7) // 8 * 8
        acc[:whole] = np.float32(0.0)
        peak[:whole] = LOW
        total[:whole] = np.float32(0.0)
        queries[rows:whole] = np.float32(0.0)
        for r in range(rows):
            column = (head * G + r % G) * D
            for d in range(D):
                queries[r, d] = q[t0 + r // G, column + d]
        context = position + num
        for first in range(0, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            padded = (n + 31) // 32 * 32
            values[n:padded] = np.float32(0.0)
            for start in range(0, n, BS):
                block = np.int64(table[(first + start) // BS])
                k, v = cache[block, layer, 0, head].ctypes.data, cache[block, layer, 1, head].ctypes.data
                for j in range(0, BS, 16):
                    transpose_keys(k + j * D * BYTES, keys_t.ctypes.data + (start + j) * 4)
                for j in range(min(BS, n - start)):
                    widen_row(v + j * D * BYTES, values.ctypes.data + (start + j) * D * 4)
            scores[:whole, :padded] = np.float32(0.0)
            for r in range(0, whole, 8):
                for j in range(0, padded, 32):
                    for d in range(0, D, 16):
                        score_product(
                            queries.ctypes.data + (r * D + d) * 4,
                            keys_t.ctypes.data + (d * KEY_TILE + j) * 4,
                            scores.ctypes.data + (r * KEY_TILE + j) * 4,
                        )
            for r in range(rows):
                for j in range(min(n, max(0, position + r // G + 1 - first)), padded):
                    scores[r, j] = LOW
                softmax_step(scores[r], padded, peak, total, acc, r)
            for r in range(0, whole, 8):
                for d in range(0, D, COLUMNS):
                    for j in range(0, padded, 16):
                        value_product(
                            scores.ctypes.data + (r * KEY_TILE + j) * 4,
                            values.ctypes.data + (j * D + d) * 4,
                            acc.ctypes.data + (r * D + d) * 4,
                        )
        for r in range(rows):
            inverse = np.float32(1.0) / total[r]
            column = (head * G + r % G) * D
            for d in range(D):
                store(out, t0 + r // G, column + d, acc[r, d] * inverse)

    @part
    def scratch(work: Any) -> Any:
        """scores [R, KEY_TILE], acc [R, D], peak [R], total [R], queries [R, D], keys_t [D, KEY_TILE], values
        [KEY_TILE, D].
        """
        a = R * KEY_TILE
        b = a + R * D
        c = b + 2 * R
        d = c + R * D
        e = d + D * KEY_TILE
        return (
            work[:a].reshape(R, KEY_TILE), work[a:b].reshape(R, D), work[b : b + R], work[b + R : c],
            work[c:d].reshape(R, D),
            work[d:e].reshape(D, KEY_TILE), work[e : e + D * KEY_TILE].reshape(KEY_TILE, D),
        )  # fmt: skip

    def attention(
        qkv: Any, layer: int, cache: Any, q: Any, out: Any, positions: Any, slots: Any, cos: Any, sin: Any,
        items: Any, bins: Any, tables: Any, work: Any,
    ) -> None:  # fmt: skip
        """qkv [T, (num_heads + 2 num_kv_heads) D] in; q [T, num_heads D] float32 scratch; out [T, num_heads D].

        items [num_items, 5]: first token, number of tokens, its position, sequence, KV head. Bin i works on items
        bins[i] .. bins[i + 1] - 1 with scratch row i of `work`.
        """
        num_tokens = qkv.shape[0]
        if num_tokens < 8:
            for t in range(num_tokens):
                place_token(t, qkv, q, positions, slots, cos, sin, cache, layer)
        else:
            for t in prange(num_tokens):
                place_token(t, qkv, q, positions, slots, cos, sin, cache, layer)
        for b in prange(len(bins) - 1):
            for i in range(bins[b], bins[b + 1]):
                t0, num, position, sequence, head = items[i, 0], items[i, 1], items[i, 2], items[i, 3], items[i, 4]
                if num == 1:
                    after = min(i + 1, bins[b + 1] - 1)
                    attend_token(
                        t0,
                        head,
                        tables[sequence],
                        position + 1,
                        items[after, 4],
                        tables[items[after, 3]],
                        q,
                        out,
                        cache,
                        layer,
                        work[b],
                    )
                else:
                    attend_tile(t0, num, head, tables[sequence], position, q, out, cache, layer, work[b])

    return compiled(SOURCES, key)(attention)


def tile_rows(group: int) -> int:
    """Query rows of a prompt tile, a multiple of 8: whole tokens of `group` rows, at least one."""
    return max(TILE_ROWS, (group + 7) // 8 * 8)


def scratch_elements(head_dim: int, group: int) -> int:
    """float32 elements of one scratch row of `attention`."""
    rows = tile_rows(group)
    return rows * KEY_TILE + 2 * head_dim * KEY_TILE + 2 * rows * head_dim + 2 * rows


@register_jitable
def norm_row(h: Any, row: int, weight: Any, eps: Any, out: Any) -> None:
    hidden = h.shape[1]
    total = np.float32(0.0)
    for i in range(hidden):
        total += h[row, i] * h[row, i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
    for i in range(hidden):
        store(out, row, i, h[row, i] * scale * weight[i])


@compiled(SOURCES)
def norm(h: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMS norm of every row of h [T, hidden]."""
    for row in prange(h.shape[0]):
        norm_row(h, row, weight, eps, out)


@register_jitable
def norm_heads_row(x: Any, row: int, weight: Any, eps: Any) -> None:
    num_heads, head_dim = weight.shape
    for head in range(num_heads):
        column = head * head_dim
        total = np.float32(0.0)
        for d in range(head_dim):
            value = load(x[row, column + d])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + eps)
        for d in range(head_dim):
            store(x, row, column + d, load(x[row, column + d]) * scale * weight[head, d])


@compiled(SOURCES)
def norm_heads(x: Any, weight: Any, eps: Any) -> None:
    """RMS norm, in place, of each of the leading heads of every row; `weight` [heads, head_dim], x [T, at least heads *
    head_dim].
    """
    if x.shape[0] < 8:
        for row in range(x.shape[0]):
            norm_heads_row(x, row, weight, eps)
    else:
        for row in prange(x.shape[0]):
            norm_heads_row(x, row, weight, eps)


@register_jitable
def add_norm_row(h: Any, row: int, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for i in range(h.shape[1]):
        h[row, i] += load(delta[row, i])
    norm_row(h, row, weight, eps, out)


@compiled(SOURCES)
def add_norm(h: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """h += delta, then its norm. Few rows are not worth waking threads for."""
    if h.shape[0] < 16:
        for row in range(h.shape[0]):
            add_norm_row(h, row, delta, weight, eps, out)
    else:
        for row in prange(h.shape[0]):
            add_norm_row(h, row, delta, weight, eps, out)


@register_jitable
def silu_mul_row(gate_up: Any, row: int, out: Any) -> None:
    inner = out.shape[1]
    for i in range(inner):
        gate, up = load(gate_up[row, i]), load(gate_up[row, inner + i])
        store(out, row, i, up * gate / (np.float32(1.0) + exp2(-gate * LOG2E)))


@compiled(SOURCES)
def silu_mul(gate_up: Any, out: Any) -> None:
    """out[T, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:]."""
    if out.shape[0] < 8:
        for row in range(out.shape[0]):
            silu_mul_row(gate_up, row, out)
    else:
        for row in prange(out.shape[0]):
            silu_mul_row(gate_up, row, out)
