"""The inputs of attention: a cache of random KV, and the queries of one step over it."""

from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu.setting import Setting
from engine.kernels.attention_work import Grid, attention_work
from engine.kernels.paged_attention import Launch, Workspace, attention_grids, make_workspace, paged_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


LLAMA_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)


@dataclass(slots=True, kw_only=True)
class Paged:
    """Sequence b has queries[b] tokens in this step and contexts[b] tokens in the cache. Its blocks are scattered. No
    sequence owns block 0.
    """

    heads: Heads
    queries: list[int]
    contexts: list[int]
    q: torch.Tensor
    """[sum(queries), num_heads, head_dim]; `out` has the same shape."""
    cache: torch.Tensor
    block_tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    """int32 [B]: the contexts, on the device."""
    out: torch.Tensor
    window: int
    launches: list[Launch]
    workspace: Workspace

    def run(self, layer: int = 0) -> None:
        paged_attention(
            self.q, self.cache, layer, self.block_tables, self.starts, self.lengths, self.out,
            scale=self.heads.head_dim**-0.5, launches=self.launches, workspace=self.workspace, window=self.window,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """The least that is read and written: every key and value once, the queries and the results."""
        kv = sum(self.contexts) * 2 * self.heads.num_kv_heads * self.heads.head_dim
        return (kv + 2 * self.q.numel()) * self.q.element_size()

    @property
    def flops(self) -> int:
        """Operations of the scores and of the weighted sums, without keys that a query may not see."""
        seen = sum(n * context - n * (n - 1) // 2 for n, context in zip(self.queries, self.contexts, strict=True))
        return 4 * seen * self.heads.num_heads * self.heads.head_dim


def make_paged(
    setting: Setting,
    heads: Heads,
    queries: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    *,
    num_layers: int = 1,
    window: int = 0,
) -> Paged:
    num_blocks = 1 + sum(-(-context // heads.block_size) for context in contexts)
    shape = (num_blocks, heads.num_kv_heads, num_layers, 2, heads.block_size, heads.head_dim)
    cache = torch.empty(shape, dtype=dtype, device=setting.device).normal_().permute(0, 2, 3, 1, 4, 5)
    return over_cache(setting, heads, queries, contexts, cache, window)


def grids_of(setting: Setting, heads: Heads, dtype: torch.dtype) -> tuple[Grid, ...]:
    """Of attention's launches on the setting's GPU; a rehearsal has 8 multiprocessors."""
    num_sms = setting.size(0, 8) or torch.cuda.get_device_properties(setting.device).multi_processor_count
    return attention_grids(heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, num_sms)


def over_cache(
    setting: Setting,
    heads: Heads,
    queries: list[int],
    contexts: list[int],
    cache: torch.Tensor,
    window: int = 0,
) -> Paged:
    """`cache` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; its last stride is 1."""
    device, per_sequence = setting.device, [-(-context // heads.block_size) for context in contexts]
    ids = (torch.randperm(len(cache) - 1) + 1)[: sum(per_sequence)].split(per_sequence)
    block_tables = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    q = torch.empty(sum(queries), heads.num_heads, heads.head_dim, dtype=cache.dtype, device=device).normal_()
    grids = grids_of(setting, heads, cache.dtype)
    works = attention_work(grids, starts.numpy(), np.array(contexts), window)
    return Paged(
        heads=heads,
        queries=queries,
        contexts=contexts,
        q=q,
        cache=cache,
        block_tables=block_tables.to(device),
        starts=starts.to(device),
        lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
        out=torch.full_like(q, torch.nan),
        window=window,
        launches=[Launch(work.grid, torch.from_numpy(work.array).to(device), work.num_merges) for work in works],
        workspace=make_workspace(grids, heads.num_heads, heads.num_kv_heads, heads.head_dim, device),
    )
