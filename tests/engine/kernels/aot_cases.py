"""Launches at production shapes, for `compile_ahead.py`: name -> call with `meta` tensors.

8B: hidden 4096, intermediate 14336, 32 query and 8 key/value heads. 70B: hidden 8192, intermediate 28672, 64 and 8.
Both: head_dim 128, vocabulary 128256, 32 and 80 layers. Gemma 3 4B, Phi-3-mini and SmolLM2-135M have other
heads. A kernel whose name starts with `attention` must use tensor cores, except in float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.kernels.attention_work import Grid
from engine.kernels.block_copy import gather_blocks, pull_blocks, scatter_blocks
from engine.kernels.gated_activation import gated_activation
from engine.kernels.paged_attention import Launch, attention_grids, make_workspace, paged_attention, variants
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_and_cache import rope_and_cache
from engine.kernels.sampling import greedy, mask, penalise, sample

BLOCK_SIZE = 16
Case = Callable[[], object]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B, PHI_MINI, GEMMA_4B = Heads(32, 8, 128), Heads(32, 32, 96), Heads(8, 4, 256)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache(
    num_layers: int, num_kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return meta(4096, num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=dtype)


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


def _attention_cases(
    name: str, heads: Heads, num_layers: int, windows: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
) -> dict[str, Case]:
    """A case for each kernel that steps of such a model can launch."""
    num_heads, num_kv_heads, head_dim = heads
    cases: dict[str, Case] = {}
    for dtype in dtypes:
        grids = attention_grids(num_heads, num_kv_heads, head_dim, dtype, 132)
        for window, launch in variants(grids, windows, torch.device("meta")):
            rows = launch.grid.queries * num_heads // num_kv_heads
            seen = f"{rows} rows, {str(dtype).removeprefix('torch.')}{', window' if window else ''}"
            cases[f"attention {name}, {seen}"] = partial(_attention, heads, num_layers, dtype, window, grids, launch)
    return cases


def _attention(
    heads: Heads, num_layers: int, dtype: torch.dtype, window: int, grids: Sequence[Grid], launch: Launch
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    q, out = (meta(64, num_heads, head_dim, dtype=dtype) for _ in range(2))
    tables, starts, contexts = (meta(*shape, dtype=torch.int32) for shape in ((64, 512), (65,), (64,)))
    paged_attention(
        q, cache(num_layers, num_kv_heads, head_dim, dtype=dtype), 3, tables, starts, contexts, out,
        scale=head_dim**-0.5, launches=[launch], window=window,
        workspace=make_workspace(grids, num_heads, num_kv_heads, head_dim, q.device),
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


CASES: dict[str, Case] = {
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
    **_attention_cases("8B", LLAMA_8B, 32, (0, 4096), DTYPES),
    **_attention_cases("70B", Heads(64, 8, 128), 80, (0,)),
    **_attention_cases("SmolLM2", Heads(9, 3, 64), 30, (0,)),
    **_attention_cases("Phi-3-mini", PHI_MINI, 32, (0, 2047)),
    **_attention_cases("Gemma 3 4B", GEMMA_4B, 34, (0, 1024), DTYPES),
    "greedy 8B": lambda: greedy(meta(64, 128256, dtype=torch.float32), meta(64, dtype=torch.int32)),
    "mask 8B": lambda: mask(
        meta(64, 128256, dtype=torch.float32), meta(8, dtype=torch.int64), meta(8, 4008, dtype=torch.int32)
    ),
    "sample 8B": _sample,
    "penalise 8B": _penalise,
}


def cases_of(arch: int) -> dict[str, Case]:
    """Those that differ enough to be compiled: float16 shares bfloat16's tiles, and an older GPU's limits are
    looked at in the shapes that need most.
    """
    left_out = (" float16, window",) if arch >= 90 else (" float16", "70B", "Phi-3-mini", "SmolLM2")
    return {name: case for name, case in CASES.items() if not any(part in name for part in left_out)}
