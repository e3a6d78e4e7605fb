"""Attention of a step's queries over the paged cache: prompt chunks and decodes in one launch, grouped heads, causal,
online softmax.

A program takes one KV head and a tile of one sequence's queries, all query heads of the group as rows, and walks over
the keys, `BLOCK_KV` at a time, gathered from as many blocks as that takes. A sequence with one query gets a tile of 16
rows whatever the others bring: decodes of a mixed batch cost what they read and not the arithmetic of a prompt's tile.
Scores are kept in base 2, all sums in float32.

With few sequences and long contexts a decode's keys are split between programs and `merge_kernel` adds up what they
found; the arithmetic is that of Dao et al., "Flash-Decoding" (2023): each part is a softmax of its own, weighed by its
sum relative to the highest score of all.

The file is longer than 300 lines because it is one kernel and its merge. Its functions are long because Triton passes
every stride and constant by name, and because a program's registers live in one body.
"""

from typing import NamedTuple

import torch

from engine.kernels.launch import INTERPRETED, tl, triton

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
LOG2E = 1.4426950408889634
MAX_SPLITS = 32
MIN_SPLIT_KEYS = 256
"""A program that reads fewer keys costs more to start and merge than it saves."""
TWO_LOOPS = tl.constexpr(64)
"""Rows from which masks cost more than a second loop, so that keys which all rows see are taken in a loop without."""

UNSEEN = tl.constexpr(-1e30)
"""A score in a window. Not infinity, which less itself is NaN: of a whole tile a row may see nothing. Once it sees a
key, what such a tile left is multiplied by 0.
"""


class Tile(NamedTuple):
    """How a launch is cut: rows (queries x heads), keys at a time, warps of a program, stages of its loads."""

    rows: int
    block_kv: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """By what a launch brings at most: one query a sequence; a few, as drafts; more."""

    decode: Tile
    drafts: Tile
    prompt: Tile


# Chosen for no spills at head_dim 128, and few, because each is compiled when it is first used. A decode waits for
# memory: three programs of an SM, two tiles of keys and values (64 KB) under way in each. A prompt tile of 128 rows
# fills two warpgroups of tensor cores. Triton shares the stages between the loads of block ids and those that need
# them: 5 keep two tiles under way. float32 exists for comparisons; its products run on ordinary cores and want few
# registers.
NARROW = Tiles(
    decode=Tile(rows=16, block_kv=64, num_warps=4, num_stages=5),  # fewer rows than 16 are none to a tensor core
    drafts=Tile(rows=32, block_kv=64, num_warps=4, num_stages=5),
    prompt=Tile(rows=128, block_kv=64, num_warps=8, num_stages=5),
)
WIDE = Tiles(
    decode=Tile(rows=16, block_kv=32, num_warps=4, num_stages=5),
    drafts=Tile(rows=32, block_kv=32, num_warps=4, num_stages=5),
    prompt=Tile(rows=64, block_kv=32, num_warps=8, num_stages=5),
)
"""For head_dim 256, whose keys and values are twice as long."""
FLOAT32 = Tile(rows=32, block_kv=32, num_warps=8, num_stages=2)


def num_splits(batch: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Programs among which the keys of each decode are divided, so that `batch` of them fill every SM twice; 1 where
    they do anyway.
    """
    most = -(-max_context // MIN_SPLIT_KEYS)
    return max(1, min(2 * num_sms // (batch * num_kv_heads), most, MAX_SPLITS))


def workspace_size(batch: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 elements that `paged_attention` needs as `workspace` for so many splits."""
    return batch * num_heads * num_splits * (head_dim + 1)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    max_num_queries: int,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    window: int = 0,
) -> None:
    """Writes softmax(scale * q k) v of every query into `out`.

    q, out        [T, H, D], any strides of tokens and heads, D contiguous: one of HEAD_DIMS; float16, bfloat16 or
                  float32 as the cache
    cache         [num_blocks, num_layers, 2, K, block_size, D] by strides, D contiguous; H is a multiple of K;
                  block_size a power of two
    block_tables  int32 [B, W], block ids of each sequence in order; read as far as `contexts` reaches
    starts        int32 [B + 1], 0 first: sequence b owns the tokens [starts[b], starts[b + 1])
    contexts      int32 [B], tokens of the sequence in the cache, this step's included. Query i of n sits at position
                  contexts[b] - n + i
                  and sees the keys up to its own. 0 (a padding row of a CUDA graph, with one query): zeros are written,
                  nothing is read.
    max_num_queries  at least the most queries of any sequence. One kernel is compiled for 1, one up to 32 rows of a
                     group, one for more.
    num_splits    with `max_num_queries` 1 only: see the function of that name; `workspace`, float32 of
                  `workspace_size` elements at least, is used up. Contexts may be of any length, 0 included, whatever
                  the number of splits.
    window        the keys that a query sees, its own and those right before it; others are not read. 0: all of them.

    ValueError: splits without a workspace, with more than one query, or more than MAX_SPLITS.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_sequences, num_kv_heads, block_size = len(contexts), cache.shape[3], cache.shape[4]
    if not num_tokens or not num_sequences:
        return
    group = num_heads // num_kv_heads
    one_query = max_num_queries == 1
    if num_splits > 1 and (not one_query or num_splits > MAX_SPLITS):
        raise ValueError(
            f"only a decode's keys are split, {MAX_SPLITS} ways at most: not {num_splits}, with {max_num_queries} "
            "queries"
        )
    if num_splits > 1 and (
        workspace is None or workspace.numel() < workspace_size(num_sequences, num_heads, head_dim, num_splits)
    ):
        raise ValueError(f"{num_splits} splits need workspace_size(...) elements of workspace")
    group_rows = triton.next_power_of_2(group)
    tile = choose_tile(max_num_queries, group_rows, q.dtype, head_dim)
    num_queries = max(1, tile.rows // group_rows)
    num_tiles = num_sequences if one_query else num_tokens // num_queries + num_sequences
    parts = workspace if num_splits > 1 else out
    attention_kernel[(num_kv_heads, num_tiles, num_splits)](
        q, cache, layer, block_tables, starts, contexts, out, parts, scale * LOG2E, num_sequences, window,
        *q.stride()[:2], *out.stride()[:2], block_tables.stride(0), *cache.stride()[:5],
        GROUP=group, GROUP_ROWS=group_rows, QUERIES=num_queries, HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim), BLOCK_SIZE=block_size, BLOCK_KV=tile.block_kv, ONE_QUERY=one_query,
        SPLIT=num_splits > 1, WINDOWED=window > 0,
        WIDEN=bool(INTERPRETED) and q.dtype == torch.bfloat16, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(num_heads, num_sequences)](
            parts, starts, out, num_splits, *out.stride()[:2], HEAD_DIM=head_dim,
            DIMS=triton.next_power_of_2(head_dim), SPLITS=MAX_SPLITS,
        )  # fmt: skip


def choose_tile(max_num_queries: int, group_rows: int, dtype: torch.dtype, head_dim: int) -> Tile:
    if dtype == torch.float32:
        return FLOAT32
    tiles = NARROW if head_dim <= 128 else WIDE
    if max_num_queries == 1:
        return tiles.decode
    return tiles.drafts if max_num_queries * group_rows <= tiles.drafts.rows else tiles.prompt


@triton.jit
def walk_keys(
    q, acc, peak, total, keys_and_values, table, first, end, limit, positions, scale, window, stride_block,
    stride_values, stride_token,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [first, end) in whole tiles; MASKED: only those below `limit`, up to each row's own
    position and, WINDOWED, not further back than its window.
    """
    dims = tl.arange(0, DIMS)
    for start in range(first, end, BLOCK_KV):
        keys = start + tl.arange(0, BLOCK_KV)
        if MASKED:
            # what lies behind the last token was never written: neither its ids nor its values may be touched, 0 * NaN
            # is NaN
            known = keys < limit
            block_ids = tl.load(table + keys // BLOCK_SIZE, mask=known, other=0)
        else:
            block_ids = tl.load(table + keys // BLOCK_SIZE)
        at = (
            keys_and_values
            + (block_ids.to(tl.int64) * stride_block + keys % BLOCK_SIZE * stride_token)[:, None]
            + dims[None, :]
        )
        if MASKED and DIMS > HEAD_DIM:
            k = tl.load(at, mask=known[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(at, mask=known[:, None], other=0.0)
        elif DIMS > HEAD_DIM:
            k = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(at)
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            if WINDOWED:
                back = positions[:, None] - keys[None, :]
                scores = tl.where((back >= 0) & (back < window) & known[None, :], scores, UNSEEN)
            else:
                scores = tl.where((keys[None, :] <= positions[:, None]) & known[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - highest[:, None])
        shrink = tl.exp2(peak - highest)
        if MASKED and DIMS > HEAD_DIM:
            v = tl.load(at + stride_values, mask=known[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(at + stride_values, mask=known[:, None], other=0.0)
        elif DIMS > HEAD_DIM:
            v = tl.load(at + stride_values, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(at + stride_values)
        if WIDEN:
            v = v.to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = highest
    return acc, peak, total


@triton.jit
def attend(
    q, out, sums, keys_and_values, table, first_query, num_queries, context, first_key, end_key, scale, window,
    stride_q, stride_q_head, stride_out, stride_out_head, stride_block, stride_values, stride_token,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile over the keys [first_key, end_key). Row r is query first_query + r // GROUP_ROWS of the group's head r %
    GROUP_ROWS.

    `q`, `out`: where the sequence's first query and the group's first head are. SPLIT: the log2 of a row's sum goes to
    `sums`.
    """
    rows = tl.arange(0, ROWS)
    queries, heads = first_query + rows // GROUP_ROWS, rows % GROUP_ROWS
    used = (queries < num_queries) & (heads < GROUP)
    dims = tl.arange(0, DIMS)
    owned = used[:, None]
    if DIMS > HEAD_DIM:
        owned = owned & (dims < HEAD_DIM)[None, :]
    positions = context - num_queries + queries
    q_tile = tl.load(q + (queries * stride_q + heads * stride_q_head)[:, None] + dims[None, :], mask=owned, other=0.0)
    if WIDEN:
        q_tile = q_tile.to(tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if ROWS >= TWO_LOOPS:
        if WINDOWED:
            seen_from = tl.maximum(context - num_queries + first_query + (ROWS - 1) // GROUP_ROWS + 1 - window, 0)
            whole = tl.minimum(first_key + tl.cdiv(tl.maximum(seen_from - first_key, 0), BLOCK_KV) * BLOCK_KV, end_key)
            acc, peak, total = walk_keys(
                q_tile, acc, peak, total, keys_and_values, table, first_key, whole, end_key, positions, scale, window,
                stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, True, True, WIDEN,
            )  # fmt: skip
            first_key = whole
        seen_by_all = tl.minimum(context - num_queries + first_query + 1, end_key)
        whole = first_key + tl.maximum(seen_by_all - first_key, 0) // BLOCK_KV * BLOCK_KV
        acc, peak, total = walk_keys(
            q_tile, acc, peak, total, keys_and_values, table, first_key, whole, end_key, positions, scale, window,
            stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, False, WINDOWED, WIDEN,
        )  # fmt: skip
        first_key = whole
    acc, peak, total = walk_keys(
        q_tile, acc, peak, total, keys_and_values, table, first_key, end_key, end_key, positions, scale, window,
        stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, True, WINDOWED, WIDEN,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # 0: no keys
    acc = acc / total[:, None]
    at = out + (queries * stride_out + heads * stride_out_head)[:, None] + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=owned)
    if SPLIT:
        tl.store(sums + heads * (stride_out_head // HEAD_DIM), peak + tl.log2(total), mask=used)


@triton.jit
def sequence_of_tile(tile, starts, num_sequences, QUERIES: tl.constexpr, WIDTH: tl.constexpr):
    """Sequence b owns the tiles from starts[b] // QUERIES + b on: as many as its queries need, or one more."""
    begun = 0
    for first in range(0, num_sequences, WIDTH):
        sequences = first + tl.arange(0, WIDTH)
        inside = sequences < num_sequences
        first_tiles = tl.load(starts + sequences, mask=inside, other=0) // QUERIES + sequences
        begun += tl.sum((inside & (first_tiles <= tile)).to(tl.int32))
    return begun - 1


@triton.jit(
    do_not_specialize=["layer", "num_sequences", "window", "stride_table"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts"],  # pieces of one metadata buffer
)
def attention_kernel(
    q, cache, layer, tables, starts, contexts, out, parts, scale, num_sequences, window,
    stride_q, stride_q_head, stride_out, stride_out_head, stride_table,
    stride_block, stride_layer, stride_values, stride_kv_head, stride_token,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, ONE_QUERY: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (kv_head, tile, split); ONE_QUERY: tile = sequence. Without SPLIT there is one split and `parts` is not
    used.
    """
    kv_head = tl.program_id(0)
    if ONE_QUERY:
        sequence, first_query = tl.program_id(1), 0
    else:
        # the last tiles of a prompt see the most keys: they start first
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        sequence = sequence_of_tile(tile, starts, num_sequences, QUERIES, 256)
        first_query = (tile - sequence - tl.load(starts + sequence) // QUERIES) * QUERIES
    first_token = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - first_token
    if first_query >= num_queries:
        return
    context = tl.load(contexts + sequence)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(context - num_queries + first_query + 1 - window, 0)
    head = kv_head * GROUP
    q += first_token.to(tl.int64) * stride_q + head * stride_q_head
    cache += layer.to(tl.int64) * stride_layer + kv_head * stride_kv_head
    tables += sequence.to(tl.int64) * stride_table
    if SPLIT:
        split, num_splits = tl.program_id(2), tl.num_programs(2)
        num_heads = tl.num_programs(0) * GROUP
        split_keys = tl.cdiv(tl.cdiv(context - begin, num_splits), BLOCK_KV) * BLOCK_KV
        first_key = begin + split * split_keys
        end_key = tl.minimum(first_key + split_keys, context)
        part = (sequence * num_heads + head) * num_splits + split
        sums = parts + tl.num_programs(1) * num_heads * num_splits * HEAD_DIM + part
        attend(
            q, parts + part * HEAD_DIM, sums, cache, tables, 0, num_queries, context, first_key, end_key, scale,
            window, stride_q, stride_q_head, 0, num_splits * HEAD_DIM, stride_block, stride_values, stride_token,
            GROUP, GROUP_ROWS, max(GROUP_ROWS, 16), HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, True, WINDOWED, WIDEN,
        )  # fmt: skip
    else:
        out += first_token.to(tl.int64) * stride_out + head * stride_out_head
        end_key = tl.minimum(context - num_queries + first_query + QUERIES, context)
        if ONE_QUERY or num_queries == 1:
            attend(
                q, out, parts, cache, tables, 0, num_queries, context, begin, context, scale, window,
                stride_q, stride_q_head, stride_out, stride_out_head, stride_block, stride_values, stride_token,
                GROUP, GROUP_ROWS, max(GROUP_ROWS, 16), HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, False, WINDOWED, WIDEN,
            )  # fmt: skip
        else:
            attend(
                q, out, parts, cache, tables, first_query, num_queries, context, begin, end_key, scale, window,
                stride_q, stride_q_head, stride_out, stride_out_head, stride_block, stride_values, stride_token,
                GROUP, GROUP_ROWS, QUERIES * GROUP_ROWS, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, False, WINDOWED, WIDEN,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    parts, starts, out, num_splits, stride_out, stride_out_head,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence): the parts of one query's head, float32 [B, H, num_splits, HEAD_DIM] with sums [B, H,
    num_splits] behind.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) == token:
        return
    num_heads = tl.num_programs(0)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    first_part = (sequence * num_heads + head) * num_splits
    sums = parts + tl.num_programs(1) * num_heads * num_splits * HEAD_DIM + first_part
    logs = tl.load(sums + splits, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), -1e30))  # 0 throughout where there are no keys at all
    total = tl.sum(weights, 0)
    values = tl.load(
        parts + (first_part + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=(splits < num_splits)[:, None] & inside[None, :],
        other=0.0,
    )
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = out + token.to(tl.int64) * stride_out + head * stride_out_head + dims
    tl.store(at, merged.to(out.dtype.element_ty), mask=inside)
