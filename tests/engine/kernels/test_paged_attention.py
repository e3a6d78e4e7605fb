"""The walking kernel and its merge against the reference, over batches of every kind.

The file is longer than 300 lines because all its tests lay out a cache and compare in the one way that its head has.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.kernels import reference
from engine.kernels.attention_work import Work, attention_work, list_size, views
from engine.kernels.paged_attention import (
    MERGE_PARTS,
    Launch,
    attention_grids,
    attention_kernel,
    make_workspace,
    merge_kernel,
    paged_attention,
    variants,
)
from tests.engine.kernels.compare import DTYPES, TOLERANCE, poisoned, row_strided

NUM_LAYERS, LAYER = 2, 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


def assert_rows_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Per token and head: the length of the difference against the length of the result."""
    a, b = ours.double(), expected.double()
    error = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)
    assert not a.isnan().any()
    assert (error < TOLERANCE[ours.dtype]).all(), f"relative error {error.max():.2e}"


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    queries: list[int],
    contexts: list[int],
    out: torch.Tensor,
    *,
    layer: int = LAYER,
    num_sms: int = 1,
    window: int = 0,
    padded_to: int | None = None,
) -> list[Work]:
    """The kernel over the batch, on a GPU of `num_sms`. `padded_to`: as a graph of so many decodes."""
    num_heads, head_dim, num_kv_heads = *q.shape[1:], cache.shape[3]
    grids = attention_grids(num_heads, num_kv_heads, head_dim, q.dtype, num_sms)
    starts, lengths = np.cumsum([0, *queries]), np.array(contexts)
    works = attention_work(grids, starts, lengths, window)
    launches = [Launch(work.grid, torch.from_numpy(work.array), work.num_merges) for work in works]
    if padded_to is not None:
        (work,), most = works, grids[0].num_programs - 1
        static = torch.full((list_size(work.grid, padded_to + most),), 2**30, dtype=torch.int32)
        static[: len(work.array)] = torch.from_numpy(work.array)
        launches = [Launch(work.grid, static, most)]
    workspace = make_workspace(grids, num_heads, num_kv_heads, head_dim, q.device)
    for poison in workspace:
        poison.fill_(torch.nan)
    paged_attention(
        q, cache, layer, block_tables, torch.from_numpy(starts).int(), torch.from_numpy(lengths).int(), out,
        scale=head_dim**-0.5, launches=launches, workspace=workspace, window=window,
    )  # fmt: skip
    return works


class Batch(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    queries: list[int]
    contexts: list[int]


def make_batch(
    queries: list[int],
    contexts: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    window: int = 0,
) -> Batch:
    """Sequence b brings queries[b] tokens and has contexts[b] in the cache. What it does not own of cache and table is
    poison, and so is what lies before the window of its first query.
    """
    table_width = max(-(-context // block_size) for context in contexts) + 2
    num_blocks = sum(-(-context // block_size) for context in contexts) + 1
    cache = poisoned(num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    block_tables = torch.full((len(contexts), table_width), 2**30, dtype=torch.int32)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    for b, context in enumerate(contexts):
        first = max(0, context - queries[b] + 1 - window) if window else 0
        for begin in range(first // block_size * block_size, context, block_size):
            block_tables[b, begin // block_size] = block = free.pop()
            known = slice(max(first - begin, 0), min(context - begin, block_size))
            cache[block, LAYER, :, :, known] = torch.randn(2, num_kv_heads, known.stop - known.start, head_dim).to(
                dtype
            )
    q = 2 * torch.randn(sum(queries), num_heads, head_dim).to(dtype)
    return Batch(q, cache, block_tables, queries, contexts)


def compare(
    queries: list[int],
    contexts: list[int],
    *,
    num_sms: int = 1,
    strided: bool = False,
    window: int = 0,
    **how: Any,
) -> list[Work]:
    """The kernel against the reference; returns how the work was divided."""
    batch = make_batch(queries, contexts, window=window, **how)
    q, cache, block_tables = batch.q, batch.cache, batch.block_tables
    outs = [poisoned(*q.shape, dtype=q.dtype) for _ in range(2)]
    ours, given = (row_strided(outs[0]), row_strided(q)) if strided else (outs[0], q)
    works = attend(given, cache, block_tables, queries, contexts, ours, num_sms=num_sms, window=window)
    if window:
        cache, block_tables = cache.nan_to_num(), block_tables % 2**30
    starts = torch.tensor([0, *queries]).cumsum(0)
    reference.paged_attention(
        q, cache, LAYER, block_tables, starts, torch.tensor(contexts), outs[1], scale=q.shape[2] ** -0.5, window=window
    )
    padding = torch.repeat_interleave(torch.tensor(contexts) == 0, torch.tensor(queries))
    assert ours[padding].isnan().all(), "padding was written"
    assert_rows_close(ours[~padding], outs[1][~padding])
    return works


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (8, 2), (8, 1)])  # GQA 1, 3, 4, 8
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    compare([1, 9], [70, 21], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decodes_end_at_before_and_after_the_edges(block_size: int, dtype: torch.dtype) -> None:
    """Of blocks, and of the tiles of 32 or 64 keys."""
    contexts = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299, 300]
    compare([1] * len(contexts), contexts, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32])
def test_prompts_end_at_before_and_after_the_edges(block_size: int, dtype: torch.dtype) -> None:
    """Whole prompts: a tile is 32 queries of float16, 8 of float32."""
    lengths = [2, 16, 17, 31, 32, 33, 64, 65]
    compare(lengths, lengths, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chunks_and_decodes_in_one_launch(dtype: torch.dtype) -> None:
    """First chunks, later ones, drafts behind a decode, one sequence without queries, a padding row; strided."""
    compare(
        [40, 1, 1, 33, 3, 0, 1, 1],
        [40, 300, 1, 200, 130, 50, 0, 64],
        num_kv_heads=2,
        num_heads=6,
        dtype=dtype,
        strided=True,
    )


@pytest.mark.parametrize(
    ("window", "dtype"),
    [*product([1, 2, 31, 32, 33, 63, 64, 65, 100, 300, 301], [torch.float16]), *product([1, 33, 300], [torch.float32])],
)
def test_windows_in_chunks_and_decodes(window: int, dtype: torch.dtype) -> None:
    """Smaller than contexts, equal, larger; a row of a tile may see nothing of a whole tile of keys."""
    compare(
        [40, 1, 1, 33, 3, 0, 1, 1, 130],
        [40, 300, 1, 200, 130, 50, 0, 64, 290],
        num_kv_heads=2,
        num_heads=6,
        dtype=dtype,
        window=window,
    )


@pytest.mark.parametrize("window", [1, 15, 64, 100])
@pytest.mark.parametrize("num_sms", [1, 20])
def test_windows_of_decodes(num_sms: int, window: int) -> None:
    contexts = [1, 14, 15, 16, 17, 63, 64, 65, 99, 100, 101, 129, 300]
    compare([1] * len(contexts), contexts, num_sms=num_sms, window=window)


def test_windows_of_drafts() -> None:
    compare([5, 1, 3], [200, 64, 40], num_heads=4, window=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 96, 256])
@pytest.mark.parametrize("num_sms", [1, 8])
def test_widths_of_heads(num_sms: int, head_dim: int, dtype: torch.dtype) -> None:
    queries, contexts = ([1, 1], [700, 21]) if num_sms > 1 else ([1, 70], [70, 91])
    for window in (0, 50):
        compare(queries, contexts, head_dim=head_dim, dtype=dtype, num_sms=num_sms, strided=True, window=window)


def test_chunks_begin_at_before_and_after_the_edge_of_a_tile() -> None:
    """Keys that all rows of a tile see are taken without masks: as far as the first row's position."""
    queries = [10, 11, 12, 13]
    compare(queries, [n + computed for n, computed in zip(queries, (62, 63, 64, 65), strict=True)], block_size=32)


def test_a_long_chunk_with_multi_head_attention() -> None:
    """A tile of 128 queries of one head, and what is left of it."""
    compare([150, 1, 130], [150, 20, 290], num_heads=2, num_kv_heads=2)


# decodes, drafts and chunks, cut where they are long; (queries, contexts)
SKEWED = {
    "one long decode": ([1], [1500]),
    "one long decode among short ones": ([1] * 9, [40, 17, 1, 1300, 64, 3, 0, 65, 300]),
    "drafts": ([5, 3, 1, 5, 0, 4], [900, 40, 129, 5, 17, 64]),
    "a long prompt and decodes": ([150, 1, 1, 1], [150, 700, 5, 70]),
    "a late chunk, drafts and decodes": ([40, 1, 6, 2, 1], [700, 300, 200, 64, 0]),
    "prompts of unequal length": ([70, 33, 20], [70, 33, 400]),
}


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float16, 0), (torch.float16, 100), (torch.float16, 450), (torch.float32, 0)]
)
@pytest.mark.parametrize("name", SKEWED)
def test_tiles_cut_between_programs(name: str, window: int, dtype: torch.dtype) -> None:
    works = compare(*SKEWED[name], num_heads=3, dtype=dtype, num_sms=16, strided=True, window=window)
    assert window or any(work.num_merges for work in works)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dtype"),
    [*product([2], [2], DTYPES), (5, 1, torch.bfloat16), (20, 1, torch.bfloat16), (40, 2, torch.float16)],
)
def test_parts_of_groups_of_any_size(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """Also of more heads than the lowest tile has rows."""
    works = compare([1, 40, 3], [900, 700, 20], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, num_sms=16)
    assert any(work.num_merges for work in works)


def test_more_parts_of_a_tile_than_the_merge_takes_at_once() -> None:
    (work,) = compare([1], [256 * 20 + 7], head_dim=16, num_sms=10)
    assert work.num_merges == 1 and work.grid.num_programs == 20 > 2 * MERGE_PARTS


@pytest.mark.parametrize("window", [0, 100])
def test_padded_or_not_and_again_bits_are_the_same(window: int) -> None:
    """As a graph's static buffer holds the list, with what an earlier, larger batch left on the device behind it."""
    batch = make_batch([1] * 5, [700, 3, 64, 1200, 90], num_heads=6, num_kv_heads=2)
    q, cache, tables, queries, contexts = batch
    outs = [poisoned(5, 6, 64, dtype=q.dtype) for _ in range(2)]
    for out in outs:
        attend(q, cache, tables, queries, contexts, out, num_sms=16, window=window)
    padded = poisoned(8, 6, 64, dtype=q.dtype)
    attend(
        torch.cat([q, poisoned(3, 6, 64, dtype=q.dtype)]), cache, torch.cat([tables, tables[:3]]),
        [*queries, 1, 1, 1], [*contexts, 0, 0, 0], padded, num_sms=16, window=window, padded_to=8,
    )  # fmt: skip
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], padded[:5]) and padded[5:].isnan().all()


def test_decodes_among_prompts_have_the_tile_that_they_have_alone() -> None:
    works = compare([1, 100, 4, 1, 7], [300, 100, 90, 64, 64])
    grids = attention_grids(4, 1, 64, torch.float16, 1)
    assert [work.grid for work in works] == list(grids) and [grid.queries for grid in grids] == [4, 8, 32]
    assert [
        sorted({sequence for sequence, *_ in rows})
        for rows in (views(work.grid, work.array)[2].tolist() for work in works)
    ] == [[0, 2, 3], [4], [1]]


def test_a_single_query_and_none() -> None:
    compare([1], [1], head_dim=128)
    compare([1], [0])
    assert attention_work(attention_grids(4, 1, 64, torch.float16, 1), np.zeros(1, int), np.zeros(0, int)) == []


@pytest.mark.parametrize("window", [0, 5])
def test_variants_are_all_that_any_batch_launches_and_do_nothing(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    launched: list[Any] = []
    run = type(attention_kernel).run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append((self.fn.__name__, tuple(sorted(options.items()))))
        if args[0] is idle:
            run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(type(attention_kernel), "run", note)
    idle, out = (poisoned(2, 6, 64, dtype=torch.float16) for _ in range(2))
    cache, poison = poisoned(2, NUM_LAYERS, 2, 2, 16, 64, dtype=torch.float16), torch.full((2, 1), 2**30).int()
    grids, device = attention_grids(6, 2, 64, torch.float16, 16), out.device
    workspace = make_workspace(grids, 6, 2, 64, device)
    for kind, launch in variants(grids, (0, window), device):
        paged_attention(
            idle, cache, 0, poison, poison[:, 0], poison[:, 0], out,
            scale=1.0, launches=[launch], workspace=workspace, window=kind,
        )  # fmt: skip
    assert out.isnan().all()
    known = set(launched)
    assert len(known) == (2 if window else 1) * len(grids) + 1
    launched.clear()
    for queries, contexts in SKEWED.values():
        batch = make_batch(queries, contexts, num_heads=6, num_kv_heads=2, window=window)
        attend(*batch, torch.empty_like(batch.q), num_sms=16, window=window)
    assert launched and set(launched) <= known


def test_a_block_behind_2_to_the_31_elements() -> None:
    """Block 2,060 at 8B's stride. The cache is never written elsewhere, so that its 4 GB cost no memory."""
    cache = torch.empty(2061, 32, 2, 8, 16, 128, dtype=torch.float16)
    assert cache.stride(0) == 1 << 20
    cache[2060, 31] = torch.randn(cache.shape[2:])
    small = cache[2060:, 31:].clone()
    q, outs = (
        torch.randn(1, 32, 128, dtype=torch.float16),
        [poisoned(1, 32, 128, dtype=torch.float16) for _ in range(2)],
    )
    attend(q, cache, torch.tensor([[2060]], dtype=torch.int32), [1], [13], outs[0], layer=31)
    reference.paged_attention(
        q, small, 0, torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([13]), outs[1],
        scale=128**-0.5,
    )  # fmt: skip
    assert_rows_close(*outs)


def test_layers_and_batches_are_one_kernel() -> None:
    """Specialised on its value or alignment, what varies between steps would compile again in the midst of one."""
    assert attention_kernel.kwargs["do_not_specialize"] == ["layer", "window", "stride_table"]
    assert attention_kernel.kwargs["do_not_specialize_on_alignment"] == ["tables", "starts", "contexts", "work"]
    assert merge_kernel.kwargs["do_not_specialize"] == ["num_programs", "num_kv_heads"]
    assert merge_kernel.kwargs["do_not_specialize_on_alignment"] == ["work", "starts"]
