"""Attention of a step's queries over the paged cache: prompt chunks, drafts and decodes by one kernel that walks a work
list, grouped heads, causal, online softmax.

An item of the list is a tile of one sequence's queries, all query heads of a group as rows, and a range of its keys,
which are taken `BLOCK_KV` at a time, gathered from as many blocks as that takes. `attention_work.py` makes the lists on
the host, so that all programs of a launch have the same to do, however the lengths of a batch differ. Scores are kept
in base 2, all sums in float32.

Sequences are sorted by the lowest tile that holds all their queries, and each height is a launch of its own over its
own items: decodes of a mixed batch get tiles of 16 rows whatever the others bring. In one launch with prompts they
would have the registers and the shared memory of a prompt's tile, which leave room for one program of an SM where two
of their own fit. A second launch costs one more start, and neither ends in a long tail.

Where a tile's keys are cut between programs, `merge_kernel` adds up what they found; the arithmetic is that of Dao et
al., "Flash-Decoding" (2023): each part is a softmax of its own, weighed by its sum relative to the highest score of
all.

The file is longer than 300 lines because it is one kernel and its merge. Its functions are long because Triton passes
every stride and constant by name, and because a program's registers live in one body.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from engine.kernels.attention_work import ITEM_FIELDS, MERGE_FIELDS, Grid, idle
from engine.kernels.launch import INTERPRETED, tl, triton

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
LOG2E = 1.4426950408889634
ITEM, MERGE = tl.constexpr(ITEM_FIELDS), tl.constexpr(MERGE_FIELDS)
TWO_LOOPS = tl.constexpr(64)
"""Rows from which masks cost more than a second loop, so that keys which all rows see are taken in a loop without."""
MAX_REGISTERS = 255
"""Of a thread. Said aloud, or the assembler would rather spill than let registers forbid one more program of an SM."""
MERGE_ROWS = 4
"""Rows that a program of the merge adds up: the heads of a group of 4, which is all that a decode has."""
MERGE_PARTS = 8

UNSEEN = tl.constexpr(-1e30)
"""A score that does not count. Not infinity, which less itself is NaN: a row may see nothing of a tile of keys, or of
all keys of a part. Once it sees a key, here or in the merge, what such keys left is multiplied by 0.
"""


class Tile(NamedTuple):
    """How a launch is cut: rows (queries x heads), keys at a time, warps of a program, stages of its loads, programs
    that share an SM.
    """

    rows: int
    block_kv: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# For decodes, drafts, prompts. Chosen for no spills at head_dim 128, and few, because each is compiled. A decode waits
# for memory: two programs of an SM, and two tiles of keys and values (64 KB) under way in each. A prompt tile of 128
# rows fills two warpgroups of tensor cores and the registers of an SM. Triton shares the stages between the loads of
# block ids and those that need them: 5 keep two tiles under way. float32 exists for comparisons; its products run on
# ordinary cores and want few registers.
NARROW = (
    Tile(rows=16, block_kv=64, num_warps=4, num_stages=5, programs_per_sm=2),  # fewer are none to a tensor core
    Tile(rows=32, block_kv=64, num_warps=4, num_stages=5, programs_per_sm=2),
    Tile(rows=128, block_kv=64, num_warps=8, num_stages=5, programs_per_sm=1),
)
WIDE = (
    Tile(rows=16, block_kv=32, num_warps=4, num_stages=5, programs_per_sm=2),
    Tile(rows=32, block_kv=32, num_warps=4, num_stages=5, programs_per_sm=2),
    Tile(rows=64, block_kv=32, num_warps=8, num_stages=5, programs_per_sm=1),
)
"""For head_dim 256, whose keys and values are twice as long."""
FLOAT32 = (
    Tile(rows=16, block_kv=16, num_warps=8, num_stages=1, programs_per_sm=1),
    Tile(rows=32, block_kv=16, num_warps=8, num_stages=1, programs_per_sm=1),
)


class Launch(NamedTuple):
    """A `Work` on the device. `num_merges`: tiles that may have been cut; in a graph, as many as can be."""

    grid: Grid
    work: torch.Tensor
    """int32, laid out as `Work.array`."""
    num_merges: int


class Workspace(NamedTuple):
    """Parts of cut tiles, float32, used up by each call: [parts, K, rows of a tile, D] and, of each row, the log2 of
    its sum [parts, K, rows of a tile], both flat.
    """

    parts: torch.Tensor
    sums: torch.Tensor


def attention_grids(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_sms: int
) -> tuple[Grid, ...]:
    """Of all launches that a model of such heads can need, ascending: for `attention_work`. Their programs fill every
    SM as often as its tiles allow, once.
    """
    tiles = _tiles(num_heads // num_kv_heads, head_dim, dtype)
    return tuple(
        Grid(queries, tile.block_kv, max(1, num_sms * tile.programs_per_sm // num_kv_heads))
        for queries, tile in tiles.items()
    )


def make_workspace(
    grids: Iterable[Grid], num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> Workspace:
    """Room for the launches of all of these grids, one after another."""
    group_rows = triton.next_power_of_2(num_heads // num_kv_heads)
    rows = max(grid.max_parts * num_kv_heads * grid.queries * group_rows for grid in grids)
    return Workspace(*(torch.empty(rows * width, dtype=torch.float32, device=device) for width in (head_dim, 1)))


def variants(grids: Sequence[Grid], windows: Iterable[int], device: torch.device) -> list[tuple[int, Launch]]:
    """Every kernel that steps over these grids launch, as (`window`, launch) for a call of `paged_attention`: one with
    a window and one without, as far as `windows` (0: none) has them, for each grid. The lists have no items, so the
    calls compile kernel and merge, read no cache and write nothing.
    """
    kinds = {window > 0: window for window in windows}
    return [
        (window, Launch(grid, torch.from_numpy(idle(grid).array).to(device), 1))
        for window in kinds.values()
        for grid in grids
    ]


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
    launches: Iterable[Launch],
    workspace: Workspace,
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
                  contexts[b] - n + i and sees the keys up to its own. 0 (a padding row of a CUDA graph): nothing is
                  read and `out` stays as it is.
    launches      the batch's work for this window, by `attention_work` from the same starts and contexts
    workspace     by `make_workspace` for the launches' grids
    window        the keys that a query sees, its own and those right before it; others are not read. 0: all of them.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = cache.shape[3], cache.shape[4]
    group = num_heads // num_kv_heads
    group_rows, dims = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    for grid, work, num_merges in launches:
        tile, rows = _tiles(group, head_dim, q.dtype)[grid.queries], grid.queries * group_rows
        attention_kernel[(num_kv_heads, grid.num_programs)](
            q, cache, layer, block_tables, starts, contexts, work, out, *workspace, scale * LOG2E, window,
            *q.stride()[:2], *out.stride()[:2], block_tables.stride(0), *cache.stride()[:5],
            GROUP=group, GROUP_ROWS=group_rows, ROWS=rows, HEAD_DIM=head_dim, DIMS=dims, BLOCK_SIZE=block_size,
            BLOCK_KV=tile.block_kv, WINDOWED=window > 0, WIDEN=bool(INTERPRETED) and q.dtype == torch.bfloat16,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        if num_merges:
            merge_kernel[(num_kv_heads * (rows // MERGE_ROWS), num_merges)](
                *workspace, work, starts, out, grid.num_programs, num_kv_heads, *out.stride()[:2],
                GROUP=group, GROUP_ROWS=group_rows, HEAD_DIM=head_dim, DIMS=dims, ROWS=MERGE_ROWS, PARTS=MERGE_PARTS,
            )  # fmt: skip


@cache
def _tiles(group: int, head_dim: int, dtype: torch.dtype) -> dict[int, Tile]:
    """By the number of queries that fit, ascending."""
    group_rows = triton.next_power_of_2(group)
    tiles: dict[int, Tile] = {}
    for tile in FLOAT32 if dtype == torch.float32 else NARROW if head_dim <= 128 else WIDE:
        tiles.setdefault(max(1, tile.rows // group_rows), tile)
    return tiles


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
            seen = (keys[None, :] <= positions[:, None]) & known[None, :]
            if WINDOWED:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, UNSEEN)
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


@triton.jit(
    do_not_specialize=["layer", "window", "stride_table"],
    do_not_specialize_on_alignment=["tables", "starts", "contexts", "work"],  # pieces of one metadata buffer
)
def attention_kernel(
    q, cache, layer, tables, starts, contexts, work, out, parts, sums, scale, window,
    stride_q, stride_q_head, stride_out, stride_out_head, stride_table,
    stride_block, stride_layer, stride_values, stride_kv_head, stride_token,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (kv_head, program) walks its run of items. Row r of an item's tile is query first_query + r // GROUP_ROWS
    of the group's head r % GROUP_ROWS.
    """
    kv_head, program = tl.program_id(0), tl.program_id(1)
    items = work + 1 + (1 + MERGE) * tl.num_programs(1)
    q += kv_head * GROUP * stride_q_head
    out += kv_head * GROUP * stride_out_head
    cache += layer.to(tl.int64) * stride_layer + kv_head.to(tl.int64) * stride_kv_head
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = rows % GROUP_ROWS
    for index in range(tl.load(work + program), tl.load(work + program + 1)):
        item = items + index * ITEM
        sequence, first_query = tl.load(item), tl.load(item + 1)
        first_key, end_key = tl.load(item + 2), tl.load(item + 3)
        first_token = tl.load(starts + sequence)
        num_queries = tl.load(starts + sequence + 1) - first_token
        queries = first_query + rows // GROUP_ROWS
        used = (queries < num_queries) & (heads < GROUP)
        owned = used[:, None]
        if DIMS > HEAD_DIM:
            owned = owned & (dims < HEAD_DIM)[None, :]
        before = tl.load(contexts + sequence) - num_queries
        positions = before + queries
        table = tables + sequence.to(tl.int64) * stride_table
        q_tile = tl.load(
            q
            + first_token.to(tl.int64) * stride_q
            + (queries * stride_q + heads * stride_q_head)[:, None]
            + dims[None, :],
            mask=owned,
            other=0.0,
        )
        if WIDEN:
            q_tile = q_tile.to(tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if ROWS >= TWO_LOOPS:
            if WINDOWED:
                seen_from = before + first_query + (ROWS - 1) // GROUP_ROWS + 1 - window
                whole = first_key + tl.cdiv(tl.maximum(seen_from - first_key, 0), BLOCK_KV) * BLOCK_KV
                whole = tl.minimum(whole, end_key)
                acc, peak, total = walk_keys(
                    q_tile, acc, peak, total, cache, table, first_key, whole, end_key, positions, scale, window,
                    stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, True, True, WIDEN,
                )  # fmt: skip
                first_key = whole
            seen_by_all = tl.minimum(before + first_query + 1, end_key)
            whole = first_key + tl.maximum(seen_by_all - first_key, 0) // BLOCK_KV * BLOCK_KV
            acc, peak, total = walk_keys(
                q_tile, acc, peak, total, cache, table, first_key, whole, end_key, positions, scale, window,
                stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, False, WINDOWED, WIDEN,
            )  # fmt: skip
            first_key = whole
        acc, peak, total = walk_keys(
            q_tile, acc, peak, total, cache, table, first_key, end_key, end_key, positions, scale, window,
            stride_block, stride_values, stride_token, HEAD_DIM, DIMS, BLOCK_SIZE, BLOCK_KV, True, WINDOWED, WIDEN,
        )  # fmt: skip
        acc = acc / total[:, None]
        part = tl.load(item + 4)
        if part < 0:
            at = (
                out
                + first_token.to(tl.int64) * stride_out
                + (queries * stride_out + heads * stride_out_head)[:, None]
                + dims[None, :]
            )
            tl.store(at, acc.to(out.dtype.element_ty), mask=owned)
        else:
            slots = (part.to(tl.int64) * tl.num_programs(0) + kv_head) * ROWS + rows
            tl.store(parts + slots[:, None] * HEAD_DIM + dims[None, :], acc, mask=owned)
            tl.store(sums + slots, peak + tl.log2(total), mask=used)


@triton.jit(do_not_specialize=["num_programs", "num_kv_heads"], do_not_specialize_on_alignment=["work", "starts"])
def merge_kernel(
    parts, sums, work, starts, out, num_programs, num_kv_heads, stride_out, stride_out_head,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Program (kv_head and piece, merge): the parts of ROWS rows of a cut tile. The grid has as many pieces for each of
    `num_kv_heads` as a tile has.
    """
    merge = work + 1 + num_programs + tl.program_id(1) * MERGE
    num_parts = tl.load(merge + 3)
    num_pieces = tl.num_programs(0) // num_kv_heads
    kv_head, piece = tl.program_id(0) // num_pieces, tl.program_id(0) % num_pieces
    sequence, first_part = tl.load(merge), tl.load(merge + 2)
    rows, dims = piece * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    first_token = tl.load(starts + sequence)
    queries, heads = tl.load(merge + 1) + rows // GROUP_ROWS, rows % GROUP_ROWS
    used = (queries < tl.load(starts + sequence + 1) - first_token) & (heads < GROUP)
    if (num_parts == 0) | (tl.max(used.to(tl.int32), 0) == 0):
        return
    inside = dims < HEAD_DIM
    peak = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(0, num_parts, PARTS):
        ahead = first + tl.arange(0, PARTS)
        known = used[:, None] & (ahead < num_parts)[None, :]
        slots = ((first_part + ahead).to(tl.int64) * num_kv_heads + kv_head)[None, :] * (num_pieces * ROWS)
        slots += rows[:, None]
        logs = tl.load(sums + slots, mask=known, other=UNSEEN)
        values = tl.load(
            parts + slots[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=known[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        highest = tl.maximum(peak, tl.max(logs, 1))
        weights = tl.where(known, tl.exp2(logs - highest[:, None]), 0.0)
        shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 1)
        peak = highest
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tokens = first_token.to(tl.int64) + queries
    at = out + (tokens * stride_out + (kv_head * GROUP + heads) * stride_out_head)[:, None] + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])
