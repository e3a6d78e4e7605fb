import pytest
import torch

from engine.kernels import reference
from engine.kernels.paged_attention import MAX_SPLITS, attention_kernel, num_splits, paged_attention, workspace_size
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


def compare(
    queries: list[int],
    contexts: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    splits: int = 1,
    strided: bool = False,
    window: int = 0,
) -> None:
    """Sequence b brings queries[b] tokens and has contexts[b] in the cache. What it does not own of cache and table is
    poison, and so is what lies before the window of its first query. The function is longer than 50 lines because it
    lays out one cache, step by step.
    """
    table_width = max(-(-context // block_size) for context in contexts) + 2
    num_blocks = sum(-(-context // block_size) for context in contexts) + 1
    cache = poisoned(num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    block_tables = torch.full((len(contexts), table_width), 2**30, dtype=torch.int32)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    for b, context in enumerate(contexts):
        for position in range(max(0, context - queries[b] + 1 - window) if window else 0, context):
            if block_tables[b, position // block_size] == 2**30:
                block_tables[b, position // block_size] = free.pop()
            block = block_tables[b, position // block_size]
            cache[block, LAYER, :, :, position % block_size] = torch.randn(2, num_kv_heads, head_dim)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = 2 * torch.randn(sum(queries), num_heads, head_dim).to(dtype)
    outs = [poisoned(sum(queries), num_heads, head_dim, dtype=dtype) for _ in range(2)]
    ours, given = (row_strided(outs[0]), row_strided(q)) if strided else (outs[0], q)
    workspace = (
        poisoned(workspace_size(len(contexts), num_heads, head_dim, splits), dtype=torch.float32)
        if splits > 1
        else None
    )
    lengths = torch.tensor(contexts, dtype=torch.int32)
    most = max(queries)
    scale = head_dim**-0.5
    paged_attention(
        given,
        cache,
        LAYER,
        block_tables,
        starts,
        lengths,
        ours,
        scale=scale,
        max_num_queries=most,
        num_splits=splits,
        workspace=workspace,
        window=window,
    )
    if window:
        cache, block_tables = cache.nan_to_num(), block_tables % 2**30
    reference.paged_attention(
        q, cache, LAYER, block_tables, starts, lengths, outs[1], scale=scale, max_num_queries=most, window=window
    )
    assert_rows_close(ours, outs[1])


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 63, 64, 65, 100, 300, 301])
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
@pytest.mark.parametrize("splits", [1, 3])
def test_windows_of_decodes(splits: int, window: int) -> None:
    contexts = [1, 14, 15, 16, 17, 63, 64, 65, 99, 100, 101, 129, 300]
    compare([1] * len(contexts), contexts, splits=splits, window=window)


def test_windows_of_drafts() -> None:
    compare([5, 1, 3], [200, 64, 40], num_heads=4, window=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 96, 256])
@pytest.mark.parametrize("splits", [1, 3])
def test_widths_of_heads(splits: int, head_dim: int, dtype: torch.dtype) -> None:
    queries, contexts = ([1, 1], [300, 21]) if splits > 1 else ([1, 70], [70, 91])
    for window in (0, 50):
        compare(queries, contexts, head_dim=head_dim, dtype=dtype, splits=splits, strided=True, window=window)


def test_chunks_begin_at_before_and_after_the_edge_of_a_tile() -> None:
    """Keys that all rows of a tile see are taken without masks: as far as the first row's position."""
    queries = [10, 11, 12, 13]
    compare(queries, [n + computed for n, computed in zip(queries, (62, 63, 64, 65), strict=True)], block_size=32)


def test_a_long_chunk_with_multi_head_attention() -> None:
    """A tile of 128 queries of one head, and what is left of it."""
    compare([150, 1, 130], [150, 20, 290], num_heads=2, num_kv_heads=2)


def test_more_sequences_than_one_look_at_the_starts() -> None:
    """A tile's sequence is searched among 256 at a time."""
    queries = [1] * 255 + [3, 1, 2, 1]
    compare(queries, [n + 1 for n in queries], num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("splits", [2, 5])
def test_split_keys(splits: int, dtype: torch.dtype) -> None:
    """Contexts that give every split work, and some or all of them none."""
    queries = [1, 1, 1, 1, 0, 1]
    compare(queries, [300, 129, 64, 1, 17, 0], num_heads=6, num_kv_heads=2, dtype=dtype, splits=splits, strided=True)


def test_a_single_query_and_none() -> None:
    compare([1], [1], head_dim=128)
    compare([1], [0])
    none = torch.empty(0, dtype=torch.int32)
    q = torch.empty(0, 4, 64)
    cache = torch.empty(1, 1, 2, 1, 16, 64)
    paged_attention(
        q, cache, 0, none.view(0, 1), torch.zeros(1, dtype=torch.int32), none, q, scale=1.0, max_num_queries=1
    )


def test_padding_of_a_graph_leaves_zeros_and_touches_no_table() -> None:
    """A table may point anywhere there."""
    out = poisoned(3, 4, 64, dtype=torch.float16)
    cache = poisoned(2, 1, 2, 1, 16, 64, dtype=torch.float16)
    tables, starts = torch.full((3, 1), 2**31 - 1, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    q = poisoned(3, 4, 64, dtype=torch.float16)
    paged_attention(q, cache, 0, tables, starts, torch.zeros(3, dtype=torch.int32), out, scale=1.0, max_num_queries=1)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_block_behind_2_to_the_31_elements() -> None:
    """Block 2,060 at 8B's stride. The cache is never written elsewhere, so that its 4 GB cost no memory."""
    cache = torch.empty(2061, 32, 2, 8, 16, 128, dtype=torch.float16)
    assert cache.stride(0) == 1 << 20
    cache[2060, 31] = torch.randn(cache.shape[2:])
    small = cache[2060:, 31:].clone()
    starts, contexts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([13], dtype=torch.int32)
    q, outs = (
        torch.randn(1, 32, 128, dtype=torch.float16),
        [poisoned(1, 32, 128, dtype=torch.float16) for _ in range(2)],
    )
    paged_attention(
        q,
        cache,
        31,
        torch.tensor([[2060]], dtype=torch.int32),
        starts,
        contexts,
        outs[0],
        scale=128**-0.5,
        max_num_queries=1,
    )
    reference.paged_attention(
        q,
        small,
        0,
        torch.tensor([[0]], dtype=torch.int32),
        starts,
        contexts,
        outs[1],
        scale=128**-0.5,
        max_num_queries=1,
    )
    assert_rows_close(*outs)


def test_layers_and_batches_are_one_kernel() -> None:
    """Specialised on its value, a layer or a batch of 1 or a multiple of 16 would compile again in the midst of a
    step.
    """
    assert attention_kernel.kwargs["do_not_specialize"] == ["layer", "num_sequences", "window", "stride_table"]


def test_number_of_splits() -> None:
    assert num_splits(1, 8, 100_000, 132) == MAX_SPLITS
    assert num_splits(8, 8, 100_000, 132) == 4
    assert num_splits(1, 8, 1000, 132) == 4  # 256 keys each at least
    assert num_splits(32, 8, 100_000, 132) == num_splits(300, 8, 100_000, 132) == num_splits(1, 8, 200, 132) == 1


def test_what_cannot_be_split() -> None:
    q = torch.zeros(2, 4, 64)
    cache = torch.zeros(2, 1, 2, 1, 16, 64)
    tables, starts, contexts = (
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
    )
    for most, splits in ((2, 2), (1, MAX_SPLITS + 1)):
        with pytest.raises(ValueError, match="32 ways at most"):
            paged_attention(
                q, cache, 0, tables, starts, contexts, q, scale=1.0, max_num_queries=most, num_splits=splits
            )
    for workspace in (None, torch.zeros(workspace_size(1, 4, 64, 2) - 1)):
        with pytest.raises(ValueError, match="workspace"):
            paged_attention(
                q,
                cache,
                0,
                tables,
                starts,
                contexts,
                q,
                scale=1.0,
                max_num_queries=1,
                num_splits=2,
                workspace=workspace,
            )
