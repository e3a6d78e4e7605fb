"""Measures each kernel at the shapes of an 8B model and compares it with its floor. Attention is also compared with
torch's own on contiguous keys and values.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.paged import LLAMA_8B, Heads, Paged, make_paged
from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting
from bench.gpu.timing import Floors, Stopwatch, measure_floors
from engine.kernels import block_copy, gated_activation, rms_norm, rope_and_cache, sampling
from engine.kernels.attention_work import attention_work, load_balance
from engine.kernels.paged_attention import attention_grids

NUM_SMS = 132
"""Of an H100 SXM."""
BATCHES = {
    "64 decodes x 1024": ([1] * 64, [1024] * 64),
    "one decode x 32768 among 63 x 1024": ([1] * 64, [32768] + [1024] * 63),
    "64 decodes x 1024 and a chunk of 2048": ([1] * 64 + [2048], [1024] * 64 + [2048]),
    "64 decodes x 1024 with 4 drafts": ([5] * 64, [1024] * 64),
    "prompts of 4096, 1500, 700 and 300": ([4096, 1500, 700, 300], [4096, 1500, 700, 300]),
}
"""Queries and contexts of batches over which attention's programs must have equal work."""


class Work(NamedTuple):
    """One launch of a kernel. `num_bytes` is the least that it must read and write."""

    kernel: str
    shape: str
    call: Callable[[], object]
    num_bytes: int
    flops: int = 0
    peer: Callable[[], float] | None = None
    """Measures the seconds that torch's SDPA takes for the same work."""
    prepare: Callable[[], object] = lambda: None
    """Runs before each call and is not timed. It restores what a call overwrites."""


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    watch = Stopwatch(setting)
    floors = measure_floors(setting, watch)
    columns = (
        Column("kernel"),
        Column("shape"),
        Column("time", "us", measured=True),
        Column("floor", "us", measured=True),
        Column("floor / time", "%", measured=True),
        Column("bytes", "MB"),
        Column("torch SDPA", "us", measured=True),
    )
    yield Table(
        f"attention, 8B on {NUM_SMS} multiprocessors: the longest program's work over the mean, by the lists",
        (Column("batch"), Column("balance")),
        [(shape, round(balance_of(*batch, NUM_SMS), 3)) for shape, batch in BATCHES.items()],
    )
    for title, works in (("attention", _attention_works(setting, watch)), ("others", _other_works(setting))):
        yield Table(f"{title}, 8B, {setting.model_dtype}", columns, [_row(work, watch, floors) for work in works])
    yield Note(
        f"floor: the larger of bytes over {floors.copy_bytes_s / 1e9:.4g} GB/s and FLOPs over "
        f"{floors.matmul_flops / 1e12:.4g} TFLOP/s"
        if not setting.rehearsal
        else "floor: the larger of bytes over the measured copy and FLOPs over the measured matmul"
    )
    yield Note("median of 20 between CUDA events, 512 MB overwritten before each: nothing is found in the L2 cache")
    yield Note(
        "SDPA: contiguous keys and values, no cache to look up; "
        "decodes with the group's heads as queries, the faster of two ways else"
    )


def _row(work: Work, watch: Stopwatch, floors: Floors) -> tuple[Cell, ...]:
    seconds, least_s = watch.device_s(work.call, prepare=work.prepare), floors.least_s(work.num_bytes, work.flops)
    peer_us = None if work.peer is None else work.peer() * 1e6
    return work.kernel, work.shape, seconds * 1e6, least_s * 1e6, 100 * least_s / seconds, work.num_bytes / 1e6, peer_us


def _attention_works(setting: Setting, watch: Stopwatch) -> Iterator[Work]:
    """Yields one case at a time, so that only one of the caches is in memory."""
    heads = setting.size(LLAMA_8B, Heads(num_heads=4, num_kv_heads=1, head_dim=64))
    for batch, context in setting.size(
        ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (64, 4096), (1, 8192), (1, 32768)), ((2, 40),)
    ):
        paged = make_paged(setting, heads, [1] * batch, [context] * batch, setting.model_dtype)
        yield _attention_work(paged, f"decode {batch} x {context}", partial(_decode_by_torch, paged, watch))
    for length in setting.size((512, 2048, 8192), (20,)):
        paged = make_paged(setting, heads, [length], [length], setting.model_dtype)
        yield _attention_work(paged, f"prefill {length}", partial(_prefill_by_torch, paged, watch))
    for shape, (queries, contexts) in setting.size(BATCHES, {"skewed": ([1, 1, 20], [300, 20, 30])}).items():
        paged = make_paged(setting, heads, queries, contexts, setting.model_dtype)
        yield _attention_work(paged, shape, None)


def _attention_work(paged: Paged, shape: str, peer: Callable[[], float] | None) -> Work:
    return Work("paged_attention", shape, paged.run, paged.num_bytes, flops=paged.flops, peer=peer)


def balance_of(queries: list[int], contexts: list[int], num_sms: int) -> float:
    """The longest program's work over the mean, of attention with 8B's heads over one batch."""
    heads = LLAMA_8B
    grids = attention_grids(heads.num_heads, heads.num_kv_heads, heads.head_dim, torch.bfloat16, num_sms)
    return load_balance(attention_work(grids, np.cumsum([0, *queries]), np.array(contexts)))


def _decode_by_torch(paged: Paged, watch: Stopwatch) -> float:
    """The heads of a group see the same keys, so SDPA gets them as the queries of one head."""
    batch, heads, context = len(paged.queries), paged.heads, paged.contexts[0]
    shape = batch, heads.num_kv_heads, context, heads.head_dim
    k, v = (torch.empty(shape, dtype=paged.q.dtype, device=paged.q.device).normal_() for _ in range(2))
    q = paged.q.view(batch, heads.num_kv_heads, -1, heads.head_dim)
    return watch.device_s(lambda: scaled_dot_product_attention(q, k, v))


def _prefill_by_torch(paged: Paged, watch: Stopwatch) -> float:
    """The faster of two ways: SDPA groups the heads itself, or keys and values are repeated for every head before."""
    heads = paged.heads
    q = paged.q.transpose(0, 1)[None].contiguous()
    k, v = (torch.randn_like(q[:, : heads.num_kv_heads]) for _ in range(2))
    wide_k, wide_v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1) for x in (k, v))
    return min(
        watch.device_s(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
        watch.device_s(lambda: scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)),
    )


def _other_works(setting: Setting) -> Iterator[Work]:
    hidden, inner, vocab_size = setting.size((4096, 14336, 128256), (96, 80, 5000))
    heads = setting.size(LLAMA_8B, Heads(num_heads=4, num_kv_heads=1, head_dim=64))
    randn = Random(setting)
    for rows in setting.size((1, 64, 2048), (3,)):
        yield _norm_work(rows, hidden, randn)
        yield _gated_work(rows, inner, randn)
        yield _rope_work(heads, rows, randn)
    for rows in setting.size((1, 64), (3,)):
        logits = randn(rows, vocab_size).float()
        chosen = torch.zeros(rows, dtype=torch.int32, device=setting.device)
        yield Work("greedy", f"{rows} rows", partial(sampling.greedy, logits, chosen), logits.nbytes)
        yield _sample_work(logits * 3, chosen)
    yield _copy_work(setting.size(512, 4), setting.size(1 << 20, 64), randn)


class Random:
    """Makes normally distributed tensors on the setting's device, by default in the model's dtype."""

    def __init__(self, setting: Setting) -> None:
        self._device, self._dtype = setting.device, setting.model_dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device).normal_()


def _norm_work(rows: int, hidden: int, randn: Random) -> Work:
    stream, delta, out, weight = (
        randn(rows, hidden, dtype=torch.float32),
        randn(rows, hidden),
        randn(rows, hidden),
        randn(hidden),
    )
    num_bytes = 2 * stream.nbytes + delta.nbytes + out.nbytes + weight.nbytes
    call = partial(rms_norm.add_rms_norm, stream, delta, weight, 1e-5, out)
    return Work("add_rms_norm", f"{rows} rows, float32 stream", call, num_bytes)


def _gated_work(rows: int, inner: int, randn: Random) -> Work:
    gate_up, out = randn(rows, 2 * inner), randn(rows, inner)
    return Work(
        "gated_activation",
        f"{rows} rows, silu",
        partial(gated_activation.gated_activation, gate_up, out, "silu"),
        gate_up.nbytes + out.nbytes,
    )


def _rope_work(heads: Heads, rows: int, randn: Random) -> Work:
    qkv = randn(rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    q_out = randn(rows, heads.num_heads, heads.head_dim)
    cache = randn(rows // heads.block_size + 1, 1, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    slots = torch.randperm(len(cache) * heads.block_size)[:rows].to(qkv.device)
    cos, sin = (randn(len(cache) * heads.block_size, heads.head_dim // 2, dtype=torch.float32) for _ in range(2))
    call = partial(rope_and_cache.rope_and_cache, qkv, cos, sin, slots, slots, cache, 0, q_out)
    return Work(
        "rope_and_cache", f"{rows} tokens", call, 2 * qkv.nbytes + rows * (2 * cos[0].nbytes + 2 * slots.element_size())
    )


def _sample_work(logits: torch.Tensor, out: torch.Tensor) -> Work:
    rows, device, scratch = len(logits), logits.device, torch.empty_like(logits)
    temperatures, top_ps, min_ps = (torch.full((rows,), value, device=device) for value in (0.8, 0.95, 0.0))
    top_ks, indices = torch.zeros(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    call = partial(
        sampling.sample, scratch,
        temperatures=temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, seeds=indices, indices=indices, out=out,
    )  # fmt: skip
    shape = f"{rows} rows, temperature 0.8, top_p 0.95"
    return Work("sample", shape, call, 2 * logits.nbytes, prepare=lambda: scratch.copy_(logits))


def _copy_work(num_blocks: int, width: int, randn: Random) -> Work:
    source, target = randn(num_blocks, width), randn(num_blocks, width)
    src_ids, dst_ids = (torch.randperm(num_blocks).to(source.device) for _ in range(2))
    shape = f"{num_blocks} blocks of {width * source.element_size() >> 10} KiB"
    return Work(
        "pull_blocks", shape, partial(block_copy.pull_blocks, source, src_ids, target, dst_ids), 2 * source.nbytes
    )
