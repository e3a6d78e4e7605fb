"""Compiled CPU kernels: norms, silu, rotary embedding, attention over the paged cache. numba; one set per (head_dim, group, block_size).

Arrays of bf16 are passed as uint16, of float32 as they are; all sums are float32. Attention works in base 2: q is scaled by
log2(e) / sqrt(head_dim) when it is rotated. Nothing here allocates per token; scratch comes from the caller, one row per bin (thread).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic, overload, register_jitable

from engine.runners.kernel_cache import compiled

KEY_TILE = 128
"""Keys handled at a time by a prompt tile: scores and the tile's K and V stay in the L2 cache."""
TILE_ROWS = 48
"""Query rows (tokens x heads of a group) of a prompt tile."""

# 2 ** f on [0, 1] by Chebyshev interpolation of degree 6, lowest power first; relative error 2.5e-9
E0, E1, E2, E3, E4, E5, E6 = (
    np.float32(c)
    for c in (1.0000000025, 0.6931469327588, 0.2402304544125, 0.05548063019600, 0.009684186311644, 0.001239133182310, 0.0002186578482386)
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
            array[row, column] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

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
def add_product(c: Any, a: Any, b: Any, m: int, k: int, n: int) -> None:
    """c[:m, :n] += a[:m, :k] @ b[:k, :n]; float32, row-major; m even, k a multiple of 4. Two rows and four terms share each load."""
    for i in range(0, m, 2):
        for p in range(0, k, 4):
            a00, a01, a02, a03 = a[i, p], a[i, p + 1], a[i, p + 2], a[i, p + 3]
            a10, a11, a12, a13 = a[i + 1, p], a[i + 1, p + 1], a[i + 1, p + 2], a[i + 1, p + 3]
            for j in range(n):
                b0, b1, b2, b3 = b[p, j], b[p + 1, j], b[p + 2, j], b[p + 3, j]
                c[i, j] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                c[i + 1, j] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3


@register_jitable
def softmax_step(scores: Any, row: int, n: int, peak: Any, total: Any, acc: Any, head_dim: int) -> None:
    """One more tile of n scores for one query row: turns them into weights, rescales what was summed so far to the new peak."""
    highest = peak[row]
    for j in range(n):
        highest = max(highest, scores[row, j])
    scale = exp2(peak[row] - highest)
    added = np.float32(0.0)
    for j in range(n):
        weight = exp2(scores[row, j] - highest)
        scores[row, j] = weight
        added += weight
    peak[row] = highest
    total[row] = total[row] * scale + added
    for d in range(head_dim):
        acc[row, d] *= scale


def make_attention(head_dim: int, group: int, block_size: int) -> Callable[..., None]:
    """Attention for `group` query heads per KV head; see `attention` inside for its arguments."""
    D, G, BS, HALF = head_dim, group, block_size, head_dim // 2
    SCALE = np.float32(1.4426950408889634 / head_dim**0.5)
    LOW = np.float32(-1e30)

    @register_jitable
    def rotate(x: Any, row: int, column: int, cos: Any, sin: Any, position: int, d: int) -> Any:
        """Elements d and d + HALF of one head, rotated."""
        first, second = load(x[row, column + d]), load(x[row, column + HALF + d])
        c, s = cos[position, d], sin[position, d]
        return first * c - second * s, second * c + first * s

    @register_jitable
    def place_token(t: int, qkv: Any, q: Any, positions: Any, slots: Any, cos: Any, sin: Any, cache: Any, layer: int) -> None:
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

    @register_jitable
    def attend_token(t: int, head: int, table: Any, context: int, q: Any, out: Any, cache: Any, layer: int, work: Any) -> None:
        """One token's group of query heads over `context` keys, straight from the blocks."""
        scores = work[: G * KEY_TILE].reshape(G, KEY_TILE)
        acc = work[G * KEY_TILE : G * KEY_TILE + G * D].reshape(G, D)
        peak = work[G * KEY_TILE + G * D : G * KEY_TILE + G * D + G]
        total = work[G * KEY_TILE + G * D + G : G * KEY_TILE + G * D + 2 * G]
        acc[:] = np.float32(0.0)
        peak[:] = LOW
        total[:] = np.float32(0.0)
        column = head * G * D
        for first in range(0, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            for start in range(0, n, BS):
                keys = cache[table[(first + start) // BS], layer, 0, head]
                for j in range(min(BS, n - start)):
                    for g in range(G):
                        score = np.float32(0.0)
                        for d in range(D):
                            score += q[t, column + g * D + d] * load(keys[j, d])
                        scores[g, start + j] = score
            for g in range(G):
                softmax_step(scores, g, n, peak, total, acc, D)
            for start in range(0, n, BS):
                values = cache[table[(first + start) // BS], layer, 1, head]
                here = min(BS, n - start)
                whole = here - here % 4
                for j in range(0, whole, 4):
                    for g in range(G):
                        p0, p1 = scores[g, start + j], scores[g, start + j + 1]
                        p2, p3 = scores[g, start + j + 2], scores[g, start + j + 3]
                        for d in range(D):
                            acc[g, d] += (
                                p0 * load(values[j, d])
                                + p1 * load(values[j + 1, d])
                                + p2 * load(values[j + 2, d])
                                + p3 * load(values[j + 3, d])
                            )
                for j in range(whole, here):
                    for g in range(G):
                        p0 = scores[g, start + j]
                        for d in range(D):
                            acc[g, d] += p0 * load(values[j, d])
        for g in range(G):
            inverse = np.float32(1.0) / total[g]
            for d in range(D):
                store(out, t, column + g * D + d, acc[g, d] * inverse)

    @register_jitable
    def attend_tile(
        t0: int, num: int, head: int, table: Any, position: int, q: Any, out: Any, cache: Any, layer: int, work: Any
    ) -> None:
        """Tokens t0 .. t0 + num - 1, the first at `position`, causal: K and V tiles widened to float32 once for all rows."""
        rows = num * G
        even = rows + rows % 2
        R = TILE_ROWS
        o = 0
        scores = work[o : o + R * KEY_TILE].reshape(R, KEY_TILE)
        o += R * KEY_TILE
        keys_t = work[o : o + D * KEY_TILE].reshape(D, KEY_TILE)
        o += D * KEY_TILE
        values = work[o : o + D * KEY_TILE].reshape(KEY_TILE, D)
        o += D * KEY_TILE
        acc = work[o : o + R * D].reshape(R, D)
        o += R * D
        queries = work[o : o + R * D].reshape(R, D)
        o += R * D
        peak, total = work[o : o + R], work[o + R : o + 2 * R]
        acc[:even] = np.float32(0.0)
        peak[:even] = LOW
        total[:even] = np.float32(0.0)
        queries[even - 1] = np.float32(0.0)
        for r in range(rows):
            column = (head * G + r % G) * D
            for d in range(D):
                queries[r, d] = q[t0 + r // G, column + d]
        context = position + num
        for first in range(0, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            padded = (n + 3) // 4 * 4
            for start in range(0, n, BS):
                block = table[(first + start) // BS]
                k, v = cache[block, layer, 0, head], cache[block, layer, 1, head]
                here = min(BS, n - start)
                for d in range(D):
                    for j in range(here):
                        keys_t[d, start + j] = load(k[j, d])
                for j in range(here):
                    for d in range(D):
                        values[start + j, d] = load(v[j, d])
            keys_t[:, n:padded] = np.float32(0.0)
            values[n:padded] = np.float32(0.0)
            scores[:even, :padded] = np.float32(0.0)
            add_product(scores, queries, keys_t, even, D, padded)
            for r in range(rows):
                for j in range(min(n, max(0, position + r // G + 1 - first)), padded):
                    scores[r, j] = LOW
                softmax_step(scores, r, padded, peak, total, acc, D)
            add_product(acc, scores, values, even, padded, D)
        for r in range(rows):
            inverse = np.float32(1.0) / total[r]
            column = (head * G + r % G) * D
            for d in range(D):
                store(out, t0 + r // G, column + d, acc[r, d] * inverse)

    def attention(
        qkv: Any, layer: int, cache: Any, q: Any, out: Any, positions: Any, slots: Any, cos: Any, sin: Any,
        items: Any, bins: Any, tables: Any, work: Any,
    ) -> None:  # fmt: skip
        """qkv [T, (num_heads + 2 num_kv_heads) D] in; q [T, num_heads D] float32 scratch; out [T, num_heads D].

        items [num_items, 5]: first token, number of tokens, its position, sequence, KV head; bin i works on items bins[i] .. bins[i + 1] - 1
        with scratch row i of `work`.
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
                    attend_token(t0, head, tables[sequence], position + 1, q, out, cache, layer, work[b])
                else:
                    attend_tile(t0, num, head, tables[sequence], position, q, out, cache, layer, work[b])

    compiled_attention: Callable[..., None] = compiled(attention)
    return compiled_attention


def scratch_elements(head_dim: int, group: int) -> int:
    """float32 elements of one scratch row of `attention`."""
    rows = max(TILE_ROWS, group + group % 2)
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


@compiled
def norm(h: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMS norm of every row of h [T, hidden]."""
    for row in prange(h.shape[0]):
        norm_row(h, row, weight, eps, out)


@register_jitable
def add_norm_row(h: Any, row: int, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for i in range(h.shape[1]):
        h[row, i] += load(delta[row, i])
    norm_row(h, row, weight, eps, out)


@compiled
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


@compiled
def silu_mul(gate_up: Any, out: Any) -> None:
    """out[T, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:]."""
    if out.shape[0] < 8:
        for row in range(out.shape[0]):
            silu_mul_row(gate_up, row, out)
    else:
        for row in prange(out.shape[0]):
            silu_mul_row(gate_up, row, out)
