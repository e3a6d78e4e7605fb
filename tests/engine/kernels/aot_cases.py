"""Launches at production shapes, for `compile_ahead.py`: name -> call with `meta` tensors.

8B: hidden 4096, intermediate 14336, 32 query and 8 key/value heads. 70B: hidden 8192, intermediate 28672, 64 and 8.
Both: head_dim 128, vocabulary 128256, 32 and 80 layers. Gemma 3 4B and Phi-3-mini have other heads. A kernel whose
name starts with `attention` must use tensor cores.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.kernels.block_copy import gather_blocks, pull_blocks, scatter_blocks
from engine.kernels.gated_activation import gated_activation
from engine.kernels.paged_attention import paged_attention, workspace_size
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_and_cache import rope_and_cache
from engine.kernels.sampling import greedy, penalise, sample

BLOCK_SIZE = 16


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B, PHI_MINI, GEMMA_4B = Heads(32, 8, 128), Heads(32, 32, 96), Heads(8, 4, 256)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache(num_layers: int, num_kv_heads: int = 8, head_dim: int = 128, num_blocks: int = 4096) -> torch.Tensor:
    return meta(num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)


def _rope(num_heads: int, num_layers: int, qk_norm: torch.Tensor | None = None) -> None:
    _rope_of(Heads(num_heads, 8, 128), num_layers, 128, qk_norm)


def _rope_of(heads: Heads, num_layers: int, rotary_dim: int, qk_norm: torch.Tensor | None = None) -> None:
    num_heads, num_kv_heads, head_dim = heads
    angles = meta(8192, rotary_dim // 2, dtype=torch.float32)
    tokens = meta(128, dtype=torch.int64)
    rope_and_cache(
        meta(128, (num_heads + 2 * num_kv_heads) * head_dim), angles, angles, tokens, tokens,
        cache(num_layers, num_kv_heads, head_dim), 1, meta(128, num_heads, head_dim), qk_norm, 1e-6,
    )  # fmt: skip


def _norm(hidden: int, dtype: torch.dtype) -> None:
    rms_norm(meta(128, hidden, dtype=dtype), meta(hidden, dtype=torch.float32), 1e-5, meta(128, hidden))


def _add_norm(hidden: int, dtype: torch.dtype) -> None:
    add_rms_norm(
        meta(128, hidden, dtype=dtype), meta(128, hidden), meta(hidden, dtype=torch.float32), 1e-5, meta(128, hidden)
    )


def _flat_cache() -> torch.Tensor:
    return cache(num_layers=32).flatten(1)


def _attention(
    num_heads: int, num_layers: int, num_tokens: int, num_sequences: int, max_num_queries: int, num_splits: int = 1
) -> None:
    _attention_of(Heads(num_heads, 8, 128), num_layers, num_tokens, num_sequences, max_num_queries, num_splits)


def _attention_of(
    heads: Heads, num_layers: int, num_tokens: int, num_sequences: int, max_num_queries: int, num_splits: int = 1,
    window: int = 0,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    out = meta(num_tokens, num_heads, head_dim)
    tables, starts, contexts = (
        meta(*shape, dtype=torch.int32) for shape in ((num_sequences, 512), (num_sequences + 1,), (num_sequences,))
    )
    q = meta(num_tokens, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    workspace = meta(workspace_size(num_sequences, num_heads, head_dim, num_splits), dtype=torch.float32)
    paged_attention(
        q, cache(num_layers, num_kv_heads, head_dim), 3, tables, starts, contexts, out,
        scale=head_dim**-0.5, max_num_queries=max_num_queries, num_splits=num_splits, workspace=workspace,
        window=window,
    )  # fmt: skip


def _sample() -> None:
    floats, ints, longs = (meta(64, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    logits = meta(64, 128256, dtype=torch.float32)
    sample(logits, temperatures=floats, top_ks=ints, top_ps=floats, min_ps=floats, seeds=longs, indices=longs, out=ints)


def _penalise() -> None:
    floats, ints = meta(64, dtype=torch.float32), meta(64, dtype=torch.int32)
    logits, counts = meta(64, 128256, dtype=torch.float32), meta(64, 128256, dtype=torch.int32)
    penalise(
        logits, counts, token_ids=meta(256, 8192, dtype=torch.int32), rows=ints, num_known=ints, last=ints,
        answer_bases=ints,
        repetitions=floats, presences=floats, frequencies=floats,
    )  # fmt: skip


CASES: dict[str, Callable[[], object]] = {
    "rms_norm 8B, float32 stream": lambda: _norm(4096, torch.float32),
    "rms_norm 8B": lambda: _norm(4096, torch.bfloat16),
    "rms_norm 70B, float32 stream": lambda: _norm(8192, torch.float32),
    "add_rms_norm 8B, float32 stream": lambda: _add_norm(4096, torch.float32),
    "add_rms_norm 8B": lambda: _add_norm(4096, torch.bfloat16),
    "add_rms_norm 70B, float32 stream": lambda: _add_norm(8192, torch.float32),
    "silu 8B": lambda: gated_activation(meta(128, 28672), meta(128, 14336), "silu"),
    "silu 70B": lambda: gated_activation(meta(128, 57344), meta(128, 28672), "silu"),
    "gelu_tanh Gemma 3 4B": lambda: gated_activation(meta(128, 20480), meta(128, 10240), "gelu_tanh"),
    "rope_and_cache 8B": lambda: _rope(32, 32),
    "rope_and_cache 8B, q and k normed": lambda: _rope(32, 36, meta(2, 128, dtype=torch.float32)),
    "rope_and_cache 70B": lambda: _rope(64, 80),
    "rope_and_cache Gemma 3 4B": lambda: _rope_of(GEMMA_4B, 34, 256, meta(2, 256, dtype=torch.float32)),
    "rope_and_cache Phi-3-mini": lambda: _rope_of(PHI_MINI, 32, 96),
    "rope_and_cache Phi-4-mini, 96 of 128": lambda: _rope_of(Heads(24, 8, 128), 32, 96),
    "gather_blocks 8B": lambda: gather_blocks(
        _flat_cache(), meta(64, dtype=torch.int64), meta(64, 32 * 2 * 8 * BLOCK_SIZE * 128)
    ),
    "scatter_blocks 8B": lambda: scatter_blocks(
        meta(64, 32 * 2 * 8 * BLOCK_SIZE * 128), _flat_cache(), meta(64, dtype=torch.int64)
    ),
    "pull_blocks 8B": lambda: pull_blocks(
        _flat_cache(), meta(64, dtype=torch.int64), _flat_cache(), meta(64, dtype=torch.int64)
    ),
    "attention 8B, 64 decodes": lambda: _attention(32, 32, 64, 64, 1),
    "attention 8B, 4 decodes, 8 splits": lambda: _attention(32, 32, 4, 4, 1, 8),
    "attention 8B, 16 decodes with 4 drafts": lambda: _attention(32, 32, 80, 16, 5),
    "attention 8B, chunks and decodes": lambda: _attention(32, 32, 2048, 64, 1024),
    "attention 70B, 64 decodes": lambda: _attention(64, 80, 64, 64, 1),
    "attention 70B, 4 decodes, 8 splits": lambda: _attention(64, 80, 4, 4, 1, 8),
    "attention 70B, chunks and decodes": lambda: _attention(64, 80, 2048, 64, 1024),
    "attention 8B, 64 decodes in a window": lambda: _attention_of(LLAMA_8B, 32, 64, 64, 1, window=4096),
    "attention 8B, 4 decodes, 8 splits, windows": lambda: _attention_of(LLAMA_8B, 32, 4, 4, 1, 8, window=4096),
    "attention 8B, drafts in a window": lambda: _attention_of(LLAMA_8B, 32, 80, 16, 5, window=4096),
    "attention 8B, chunks and decodes, windows": lambda: _attention_of(LLAMA_8B, 32, 2048, 64, 1024, window=4096),
    "attention Phi-3-mini, 64 decodes": lambda: _attention_of(PHI_MINI, 32, 64, 64, 1),
    "attention Phi-3-mini, 4 decodes, 8 splits": lambda: _attention_of(PHI_MINI, 32, 4, 4, 1, 8),
    "attention Phi-3-mini, chunks, windows": lambda: _attention_of(PHI_MINI, 32, 2048, 64, 1024, window=2047),
    "attention Gemma 3 4B, 64 decodes": lambda: _attention_of(GEMMA_4B, 34, 64, 64, 1),
    "attention Gemma 3 4B, 4 decodes, 8 splits": lambda: _attention_of(GEMMA_4B, 34, 4, 4, 1, 8),
    "attention Gemma 3 4B, decodes in a window": lambda: _attention_of(GEMMA_4B, 34, 64, 64, 1, window=1024),
    "attention Gemma 3 4B, drafts": lambda: _attention_of(GEMMA_4B, 34, 80, 16, 5),
    "attention Gemma 3 4B, chunks and decodes": lambda: _attention_of(GEMMA_4B, 34, 2048, 64, 1024),
    "attention Gemma 3 4B, chunks, windows": lambda: _attention_of(GEMMA_4B, 34, 2048, 64, 1024, window=1024),
    "greedy 8B": lambda: greedy(meta(64, 128256, dtype=torch.float32), meta(64, dtype=torch.int32)),
    "sample 8B": _sample,
    "penalise 8B": _penalise,
}
