"""Compiled attention over the paged cache: prompt chunks and decodes in one call. One set of functions per `Shape`.

Attention works in base 2: q is scaled by log2(e) * scale when it is rotated. Nothing here allocates per token; scratch
comes from the caller, one row per bin (thread). A score that its query may not see is LOW: its weight is 2 ** -126 of
the highest, and where a whole tile is unseen, what it leaves is multiplied by as much once a seen key follows. Each
query sees its own key, so one always does.

The file is longer than 300 lines because its functions are one kernel, made for one shape. `attend_token` has its loop
over the values and its store in it: as functions of their own they cost a decode 6 to 12 % of its attention.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numba import prange
from numba.extending import register_jitable

from engine.runners import cpu_elements, cpu_simd
from engine.runners.cpu_elements import Stored, load, store
from engine.runners.cpu_simd import (
    PRODUCT_COLUMNS,
    PRODUCT_ROWS,
    WIDTH,
    Kind,
    make_dot_keys,
    make_join_dots,
    make_part_rows,
    make_product,
    make_softmax_step,
    make_transpose_keys,
    make_weigh_values,
    make_widen_row,
)
from jit.kernel_cache import compiled, variant
from protocol.arrays import Float32, Int32, Int64

SOURCES = (__file__, cpu_elements.__file__, cpu_simd.__file__)

F = TypeVar("F", bound=Callable[..., Any])

KEY_TILE = 128
"""Keys handled at a time by a prompt tile: scores and the tile's K and V stay in the L2 cache."""
RUN = 16
"""Keys of one block that lie behind each other; a decode reads those of a tile in turns."""
TILE_ROWS = 96
"""Query rows (tokens x heads of a group) of a prompt tile."""
LOW = np.float32(-1e30)
LOG2E = 1.4426950408889634


class Shape(NamedTuple):
    """What the code is made for: `group` query heads per KV head, of whose elements the first `rotary_dim` (even) are
    rotated, halves apart; the rest pass.
    """

    head_dim: int
    group: int
    block_size: int
    kind: Kind
    rotary_dim: int

    @property
    def key(self) -> str:
        return f"{self.head_dim}_{self.group}_{self.block_size}_{self.rotary_dim}_{self.kind}"

    @property
    def element_bytes(self) -> int:
        return 4 if self.kind == "f32" else 2


class Attention(Protocol):
    """Rotates and scales q, writes k (rotated) and v into the cache, attends.

    qkv [T, (num_heads + 2 num_kv_heads) head_dim] in; out [T, num_heads head_dim]; both in the model's dtype.
    q [T, num_heads head_dim] and work [bins, `scratch_elements`]: scratch.
    cache [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], C-contiguous.
    positions, slots [T]: a token's place in its sequence and in the cache (block * block_size + offset).
    cos, sin [max positions, rotary_dim / 2].
    items [num_items, 5]: first token, number of tokens, its position, sequence, KV head. Bin i works on items bins[i]
    .. bins[i + 1] - 1 with scratch row i of `work`. `tables` [sequences, width] has the block ids by sequence.
    window: the keys that a query sees, its own and those right before it; 0: all of them.
    scale: factor of q k, usually head_dim ** -0.5.
    """

    def __call__(
        self,
        *,
        qkv: Stored,
        layer: int,
        cache: Stored,
        q: Float32,
        out: Stored,
        positions: Int64,
        slots: Int64,
        cos: Float32,
        sin: Float32,
        items: Int64,
        bins: Int64,
        tables: Int32,
        work: Float32,
        window: int,
        scale: float,
    ) -> None: ...


def supports(head_dim: int, block_size: int) -> bool:
    """Whether these shapes fill whole vectors."""
    return head_dim % WIDTH == 0 and block_size % WIDTH == 0 and KEY_TILE % block_size == 0


def tile_rows(group: int) -> int:
    """Query rows of a prompt tile, a multiple of PRODUCT_ROWS: whole tokens of `group` rows, at least one."""
    return max(TILE_ROWS, -(-group // PRODUCT_ROWS) * PRODUCT_ROWS)


def scratch_elements(head_dim: int, group: int) -> int:
    """float32 elements of one scratch row of `Attention`."""
    rows = tile_rows(group)
    tile = rows * KEY_TILE + 2 * head_dim * KEY_TILE + 2 * rows * head_dim + 2 * rows
    return tile + group * WIDTH * WIDTH


@functools.cache
def make_attention(shape: Shape) -> Attention:
    scratch, store_rows = _make_scratch(shape), _make_store_rows(shape)
    place_token = _make_place_token(shape)
    attend_token = _make_attend_token(shape, scratch)
    attend_tile = _make_attend_tile(shape, scratch, store_rows)

    def attention(
        qkv: Stored, layer: int, cache: Stored, q: Float32, out: Stored, positions: Int64, slots: Int64, cos: Float32,
        sin: Float32, items: Int64, bins: Int64, tables: Int32, work: Float32, window: int, scale: float,
    ) -> None:  # fmt: skip
        num_tokens, factor = qkv.shape[0], np.float32(LOG2E * scale)
        if num_tokens < 8:
            for t in range(num_tokens):
                place_token(
                    t, positions[t], slots[t], qkv=qkv, q=q, cos=cos, sin=sin, cache=cache, layer=layer, factor=factor
                )
        else:
            for t in prange(num_tokens):
                place_token(
                    t, positions[t], slots[t], qkv=qkv, q=q, cos=cos, sin=sin, cache=cache, layer=layer, factor=factor
                )
        for b in prange(len(bins) - 1):
            for i in range(bins[b], bins[b + 1]):
                t0, num, position, sequence, head = items[i, 0], items[i, 1], items[i, 2], items[i, 3], items[i, 4]
                if num == 1:
                    attend_token(
                        t0, head=head, table=tables[sequence], context=position + 1, window=window, q=q, out=out,
                        cache=cache, layer=layer, work=work[b],
                    )  # fmt: skip
                else:
                    attend_tile(
                        t0, num, head=head, table=tables[sequence], position=position, window=window, q=q, out=out,
                        cache=cache, layer=layer, work=work[b],
                    )  # fmt: skip

    return compiled(SOURCES, shape.key)(attention)


def _part(shape: Shape) -> Callable[[F], F]:
    """A function that attention calls, under a name of its shape."""

    def name_it(function: F) -> F:
        part: F = register_jitable(variant(function, shape.key))
        return part

    return name_it


@register_jitable
def first_seen(context: int, window: int) -> int:
    """The first key that the query sees which sees `context` keys where there is no window."""
    return max(0, context - window) if window > 0 else 0


def _make_place_token(shape: Shape) -> Callable[..., None]:
    D, G, BS, ROTARY, HALF = shape.head_dim, shape.group, shape.block_size, shape.rotary_dim, shape.rotary_dim // 2

    @_part(shape)
    def rotate(x: Stored, row: int, column: int, cos: Float32, sin: Float32, position: int, d: int) -> Any:
        """Elements d and d + HALF of one head, rotated."""
        first, second = load(x[row, column + d]), load(x[row, column + HALF + d])
        c, s = cos[position, d], sin[position, d]
        return first * c - second * s, second * c + first * s

    @_part(shape)
    def place_token(
        t: int, position: int, slot: int, qkv: Stored, q: Float32, cos: Float32, sin: Float32, cache: Stored,
        layer: int, factor: np.float32,
    ) -> None:  # fmt: skip
        """Rotates and scales one token's q into float32, writes its k (rotated) and v into the cache."""
        num_kv_heads = cache.shape[1]
        num_heads, block, offset = num_kv_heads * G, slot // BS, slot % BS
        for head in range(num_heads):
            for d in range(HALF):
                low, high = rotate(qkv, t, head * D, cos, sin, position, d)
                q[t, head * D + d] = low * factor
                q[t, head * D + HALF + d] = high * factor
            for d in range(ROTARY, D):
                q[t, head * D + d] = load(qkv[t, head * D + d]) * factor
        for head in range(num_kv_heads):
            keys, values = cache[block, head, layer, 0], cache[block, head, layer, 1]
            column = (num_heads + head) * D
            for d in range(HALF):
                low, high = rotate(qkv, t, column, cos, sin, position, d)
                store(keys, offset, d, low)
                store(keys, offset, HALF + d, high)
            for d in range(ROTARY, D):
                keys[offset, d] = qkv[t, column + d]
            column += num_kv_heads * D
            for d in range(D):
                values[offset, d] = qkv[t, column + d]

    return place_token


def _make_scratch(shape: Shape) -> Callable[..., Any]:
    D, R = shape.head_dim, tile_rows(shape.group)

    @_part(shape)
    def scratch(work: Float32) -> Any:
        """scores [R, KEY_TILE], acc [R, D], peak [R], total [R], queries [R, D], keys_t [D, KEY_TILE], values
        [KEY_TILE, D], and room for the parts of a decode's dots.
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
            work[e + D * KEY_TILE :],
        )  # fmt: skip

    return scratch


def _make_store_rows(shape: Shape) -> Callable[..., None]:
    D, G = shape.head_dim, shape.group

    @_part(shape)
    def store_rows(rows: int, t0: int, head: int, acc: Float32, total: Float32, out: Stored) -> None:
        """Row r of `acc` is head r % G of the group and token t0 + r // G."""
        for r in range(rows):
            inverse = np.float32(1.0) / total[r]
            column = (head * G + r % G) * D
            for d in range(D):
                store(out, t0 + r // G, column + d, acc[r, d] * inverse)

    return store_rows


def _make_attend_token(shape: Shape, scratch: Callable[[Float32], Any]) -> Callable[..., None]:
    D, G, BS, BYTES = shape.head_dim, shape.group, shape.block_size, shape.element_bytes
    dot_keys, NUM_DOT, LANES = make_dot_keys(D, G, shape.kind)
    join_dots, weigh_values = make_join_dots(D, G, KEY_TILE), make_weigh_values(D, G, KEY_TILE, shape.kind)
    part_queries, join_acc = (make_part_rows(D, G, shape.kind, join=join) for join in (False, True))
    softmax_step = make_softmax_step(D, tile_rows(G) * 4)

    @_part(shape)
    def place(k: int, n: int) -> int:
        """Where key number k of n stands in its tile's turns."""
        whole, rest = n // RUN, (n % RUN + NUM_DOT - 1) // NUM_DOT
        turn = k % RUN // NUM_DOT
        return (turn * whole + min(turn, rest) + k // RUN) * NUM_DOT + k % NUM_DOT

    @_part(shape)
    def score_keys(
        first: int, n: int, hidden: int, table: Int32, base: int, block_bytes: int, queries: int, parts: int,
        rows: Int64, scores: Float32,
    ) -> int:  # fmt: skip
        """Scores and addresses (`rows`) of the n keys from `first` on; LOW for the first `hidden`.

        The keys stand in turns, NUM_DOT of each run of RUN: memory that is read in several places at once comes
        faster. Returns how many there are with those that fill up the last turn, which are LOW and the address of a
        seen key.
        """
        count = 0
        for j in range(0, RUN, NUM_DOT):
            for run in range((n - j + RUN - 1) // RUN):
                k = run * RUN + j
                key = first + k
                row = base + np.int64(table[key // BS]) * block_bytes + key % BS * (D * BYTES)
                dot_keys(queries, row, parts + count % LANES * LANES * 4)
                for i in range(NUM_DOT):
                    rows[count + i] = row + min(i, n - 1 - k) * (D * BYTES)
                count += NUM_DOT
                if count % LANES == 0:
                    join_dots(parts, scores.ctypes.data + (count - LANES) * 4)
        if count % LANES != 0:
            join_dots(parts, scores.ctypes.data + count // LANES * LANES * 4)
        for g in range(G):
            for k in range(hidden):
                scores[g, place(k, n)] = LOW
            for k in range(n, n + -n % NUM_DOT):
                scores[g, place(k, n)] = LOW
            for k in range(count, (count + 31) // 32 * 32):
                scores[g, k] = LOW
        return count

    @_part(shape)
    def attend_token(
        t: int, head: int, table: Int32, context: int, window: int, q: Float32, out: Stored, cache: Stored, layer: int,
        work: Float32,
    ) -> None:  # fmt: skip
        """One token's group of query heads over its keys among the first `context`, straight from the blocks."""
        scores, acc, peak, total, queries, _, values, parts = scratch(work)
        rows = values.reshape(-1).view(np.int64)
        acc[:G] = np.float32(0.0)
        peak[:G] = LOW
        total[:G] = np.float32(0.0)
        part_queries(q.ctypes.data + (t * q.shape[1] + head * G * D) * 4, queries.ctypes.data)
        value_bytes = BS * D * BYTES
        head_bytes = cache.shape[2] * 2 * value_bytes
        block_bytes = cache.shape[1] * head_bytes
        base = cache.ctypes.data + head * head_bytes + layer * 2 * value_bytes
        begin = first_seen(context, window)
        for first in range(begin // BS * BS, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            num = score_keys(
                first, n, begin - first, table, base, block_bytes, queries.ctypes.data, parts.ctypes.data, rows, scores
            )
            padded = (num + 31) // 32 * 32
            for g in range(G):
                softmax_step(
                    scores.ctypes.data + g * KEY_TILE * 4, peak.ctypes.data + g * 4, acc.ctypes.data + g * D * 4, padded
                )
            weigh_values(scores.ctypes.data, rows.ctypes.data, value_bytes, acc.ctypes.data, num)
        join_acc(acc.ctypes.data, acc.ctypes.data)
        for g in range(G):
            inverse = np.float32(1.0) / total[g]
            for d in range(D):
                store(out, t, (head * G + g) * D + d, acc[g, d] * inverse)

    return attend_token


def _make_attend_tile(
    shape: Shape, scratch: Callable[[Float32], Any], store_rows: Callable[..., None]
) -> Callable[..., None]:
    D, G, BS = shape.head_dim, shape.group, shape.block_size
    widen_tile, score_tile, add_values = _make_widen_tile(shape), _make_score_tile(shape), _make_add_values(shape)
    softmax_step = make_softmax_step(D, tile_rows(G) * 4)

    @_part(shape)
    def attend_tile(
        t0: int, num: int, head: int, table: Int32, position: int, window: int, q: Float32, out: Stored, cache: Stored,
        layer: int, work: Float32,
    ) -> None:  # fmt: skip
        """Tokens t0 .. t0 + num - 1, the first at `position`, causal: K and V tiles widened to float32 once for all
        rows.
        """
        scores, acc, peak, total, queries, keys_t, values, _ = scratch(work)
        rows = num * G
        whole = -(-rows // PRODUCT_ROWS) * PRODUCT_ROWS
        acc[:whole] = np.float32(0.0)
        peak[:whole] = LOW
        total[:whole] = np.float32(0.0)
        queries[rows:whole] = np.float32(0.0)
        for r in range(rows):
            column = (head * G + r % G) * D
            for d in range(D):
                queries[r, d] = q[t0 + r // G, column + d]
        context = position + num
        for first in range(first_seen(position + 1, window) // BS * BS, context, KEY_TILE):
            n = min(KEY_TILE, context - first)
            padded = (n + 31) // 32 * 32
            widen_tile(
                n, padded, table=table, block=first // BS, head=head, cache=cache, layer=layer, keys_t=keys_t,
                values=values,
            )  # fmt: skip
            score_tile(whole, padded, queries=queries, keys_t=keys_t, scores=scores)
            for r in range(rows):
                end = position + r // G + 1 - first
                for j in range(min(padded, first_seen(end + first, window) - first)):
                    scores[r, j] = LOW
                for j in range(min(n, max(0, end)), padded):
                    scores[r, j] = LOW
                softmax_step(
                    scores.ctypes.data + r * KEY_TILE * 4, peak.ctypes.data + r * 4, acc.ctypes.data + r * D * 4, padded
                )
            add_values(whole, padded, weights=scores, values=values, acc=acc)
        store_rows(rows, t0=t0, head=head, acc=acc, total=total, out=out)

    return attend_tile


def _make_widen_tile(shape: Shape) -> Callable[..., None]:
    D, BS, BYTES = shape.head_dim, shape.block_size, shape.element_bytes
    transpose_keys, widen_row = make_transpose_keys(D, KEY_TILE, shape.kind), make_widen_row(D, shape.kind)

    @_part(shape)
    def widen_tile(
        n: int, padded: int, table: Int32, block: int, head: int, cache: Stored, layer: int, keys_t: Float32,
        values: Float32,
    ) -> None:  # fmt: skip
        """The n keys, transposed, and values from the sequence's block number `block` on; zeros as values up to
        `padded`.
        """
        values[n:padded] = np.float32(0.0)
        for start in range(0, n, BS):
            block_id = np.int64(table[block + start // BS])
            k, v = cache[block_id, head, layer, 0].ctypes.data, cache[block_id, head, layer, 1].ctypes.data
            for j in range(0, BS, 16):
                transpose_keys(k + j * D * BYTES, keys_t.ctypes.data + (start + j) * 4)
            for j in range(min(BS, n - start)):
                widen_row(v + j * D * BYTES, values.ctypes.data + (start + j) * D * 4)

    return widen_tile


def _make_score_tile(shape: Shape) -> Callable[..., None]:
    D = shape.head_dim
    score_product = make_product(PRODUCT_COLUMNS, D, KEY_TILE, KEY_TILE, add=False)

    @_part(shape)
    def score_tile(rows: int, padded: int, queries: Float32, keys_t: Float32, scores: Float32) -> None:
        """scores [rows, padded] = queries [rows, D] @ keys_t [D, padded]; rows in PRODUCT_ROWS, columns in 32s."""
        for r in range(0, rows, PRODUCT_ROWS):
            for j in range(0, padded, PRODUCT_COLUMNS):
                score_product(
                    queries.ctypes.data + r * D * 4,
                    keys_t.ctypes.data + j * 4,
                    scores.ctypes.data + (r * KEY_TILE + j) * 4,
                    D,
                )

    return score_tile


def _make_add_values(shape: Shape) -> Callable[..., None]:
    D = shape.head_dim
    COLUMNS = PRODUCT_COLUMNS if D % PRODUCT_COLUMNS == 0 else WIDTH
    value_product = make_product(COLUMNS, KEY_TILE, D, D, add=True)

    @_part(shape)
    def add_values(rows: int, padded: int, weights: Float32, values: Float32, acc: Float32) -> None:
        """acc [rows, D] += weights [rows, padded] @ values [padded, D]; rows in PRODUCT_ROWS, keys in 32s."""
        for r in range(0, rows, PRODUCT_ROWS):
            for d in range(0, D, COLUMNS):
                value_product(
                    weights.ctypes.data + r * KEY_TILE * 4,
                    values.ctypes.data + d * 4,
                    acc.ctypes.data + (r * D + d) * 4,
                    padded,
                )

    return add_values
