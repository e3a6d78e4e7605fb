"""Compares every kernel with `engine/kernels/reference.py`, which computes in float64, or with the CPU's sampling. The
inputs are random.

The file is longer than 300 lines because it has the inputs of every kernel. `_row_cases` is longer than 50 because it
lists one case per kernel and shape.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu.paged import LLAMA_8B, Heads, Paged, make_paged
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import Setting
from engine import sampling as on_cpu
from engine.kernels import block_copy, gated_activation, reference, rms_norm, rope_and_cache, sampling
from engine.models.config import Activation
from engine.sampling_metadata import Contexts, SamplingMetadata
from protocol.arrays import Int32
from protocol.messages import SamplingParams

GEMMA = Heads(num_heads=4, num_kv_heads=1, head_dim=256)
PHI_MINI = Heads(num_heads=2, num_kv_heads=2, head_dim=96)
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Limit of a row's relative error. bfloat16 keeps 8 bits: each rounding moves a value by up to 2^-9 of it."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""What the kernel wrote, and what the reference wrote."""


class Case(NamedTuple):
    kernel: str
    shape: str
    run: Callable[[torch.dtype], list[Pair]]
    every_dtype: bool = True
    """Whether all dtypes are tried, or only the first. Each dtype costs the compilation of a kernel."""


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    yield Note(f"inputs from seed {setting.seed}; outputs are NaN before the kernel runs")
    yield Note("error: of a row, length of the difference over length of the result; the largest of all rows")
    yield from _errors(setting, "rows", _row_cases(setting))
    yield from _exact(setting)
    yield from _sampling(setting)
    yield from _errors(setting, "attention", _attention_cases(setting))


def _errors(setting: Setting, title: str, cases: list[Case]) -> Iterator[Item]:
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        for dtype in setting.dtypes if case.every_dtype else setting.dtypes[:1]:
            error, name = (
                max(relative_error(ours, expected) for ours, expected in case.run(dtype)),
                str(dtype).removeprefix("torch."),
            )
            rows.append((case.kernel, case.shape, name, error if math.isfinite(error) else None, LIMIT[dtype]))
            if not error < LIMIT[dtype]:
                yield Problem(f"{case.kernel}, {case.shape}, {name}: error {error:.2e}")
    yield Table(
        f"{title}: errors", (Column("kernel"), Column("case"), Column("dtype"), Column("error"), Column("limit")), rows
    )


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Error of the worst row; infinite if anything is NaN."""
    a, b = ours.double().flatten(0, -2), expected.double().flatten(0, -2)
    error = ((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).max().item()
    return math.inf if math.isnan(error) else error


def _row_cases(setting: Setting) -> list[Case]:
    num_rows, hidden, inner = setting.size((77, 4096, 14336), (3, 96, 80))
    heads = setting.size(LLAMA_8B, Heads(num_heads=4, num_kv_heads=2, head_dim=64))
    stream = torch.float32

    def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=setting.device).normal_()

    def norm(dtype: torch.dtype, *, add: bool) -> list[Pair]:
        x, delta, weight = (
            randn(num_rows, hidden, dtype=stream),
            randn(num_rows, hidden, dtype=dtype),
            randn(hidden, dtype=dtype),
        )
        (h, expected_h), (out, expected) = (x, x.clone()), _poisoned_pair(delta)
        if add:
            rms_norm.add_rms_norm(h, delta, weight, 1e-5, out)
            reference.add_rms_norm(expected_h, delta, weight, 1e-5, expected)
        else:
            rms_norm.rms_norm(h, weight, 1e-5, out)
            reference.rms_norm(expected_h, weight, 1e-5, expected)
        return [(out, expected), (h, expected_h)]

    def gated(dtype: torch.dtype, activation: Activation) -> list[Pair]:
        gate_up = randn(num_rows, 2 * inner, dtype=dtype)
        out, expected = _poisoned_pair(gate_up[:, :inner])
        gated_activation.gated_activation(gate_up, out, activation)
        reference.gated_activation(gate_up, expected, activation)
        return [(out, expected)]

    def rope(dtype: torch.dtype, *, normed: bool, heads: Heads = heads, rotary_dim: int | None = None) -> list[Pair]:
        return _rope(setting, heads, num_rows, dtype, normed=normed, rotary_dim=rotary_dim or heads.head_dim)

    return [
        Case("rms_norm", f"{num_rows} x {hidden}, float32 in", lambda dtype: norm(dtype, add=False)),
        Case("add_rms_norm", f"{num_rows} x {hidden}, float32 stream", lambda dtype: norm(dtype, add=True)),
        Case("gated_activation", f"{num_rows} x {inner}, silu", lambda dtype: gated(dtype, "silu")),
        Case("gated_activation", f"{num_rows} x {inner}, gelu_tanh", lambda dtype: gated(dtype, "gelu_tanh")),
        Case("rope_and_cache", f"{num_rows} tokens", lambda dtype: rope(dtype, normed=False)),
        Case("rope_and_cache", f"{num_rows} tokens, q and k normed", lambda dtype: rope(dtype, normed=True)),
        *(
            Case(
                "rope_and_cache",
                f"{num_rows} tokens, {rotary_dim} of head_dim {wide.head_dim} rotated",
                lambda dtype, wide=wide, rotary_dim=rotary_dim: rope(  # type: ignore[misc]
                    dtype, normed=False, heads=wide, rotary_dim=rotary_dim
                ),
                every_dtype=False,
            )
            for wide, rotary_dim in ((PHI_MINI, 96), (PHI_MINI, 72), (GEMMA, 256))
        ),
    ]


def _rope(
    setting: Setting, heads: Heads, num_tokens: int, dtype: torch.dtype, *, normed: bool, rotary_dim: int
) -> list[Pair]:
    """Every third token is padding, for which nothing may be written to the cache."""
    half, num_blocks, device = rotary_dim // 2, num_tokens // heads.block_size + 2, setting.device
    qkv = torch.randn(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).to(device, dtype)
    angles = torch.rand(4 * num_tokens, half, device=device) * 6.3
    positions = torch.randint(4 * num_tokens, (num_tokens,), device=device)
    slots = torch.randperm(num_blocks * heads.block_size)[:num_tokens].to(device)
    slots[::3] = -1
    qk_norm = torch.randn(2, heads.head_dim).to(device, dtype) if normed else None
    cache = torch.randn(num_blocks, 2, 2, heads.num_kv_heads, heads.block_size, heads.head_dim).to(device, dtype)
    expected_cache = cache.clone()
    q_out, expected = _poisoned_pair(qkv[:, : heads.num_heads * heads.head_dim].unflatten(1, (heads.num_heads, -1)))
    cos, sin = angles.cos(), angles.sin()
    rope_and_cache.rope_and_cache(qkv, cos, sin, positions, slots, cache, 1, q_out, qk_norm, 1e-6)
    reference.rope_and_cache(qkv, cos, sin, positions, slots, expected_cache, 1, expected, qk_norm, 1e-6)
    return [(q_out, expected), (cache, expected_cache)]


def _attention_cases(setting: Setting) -> list[Case]:
    """The cases have prompt chunks and decodes in one step, decodes alone, a context long enough to be cut between
    programs, groups of heads of several sizes, and contexts at the edges of blocks and tiles.
    """
    group = {
        4: setting.size(LLAMA_8B, Heads(num_heads=4, num_kv_heads=1, head_dim=128)),
        3: setting.size(
            Heads(num_heads=9, num_kv_heads=3, head_dim=64, block_size=32),
            Heads(num_heads=3, num_kv_heads=1, head_dim=64),
        ),
        8: setting.size(
            Heads(num_heads=64, num_kv_heads=8, head_dim=128), Heads(num_heads=8, num_kv_heads=1, head_dim=64)
        ),
        1: Heads(num_heads=2, num_kv_heads=2, head_dim=64),
    }
    mixed = setting.size(([130, 1, 1, 33, 5, 0, 1], [130, 300, 1, 1025, 64, 50, 65]), ([18, 1, 0], [18, 33, 5]))
    decodes = setting.size([1, 15, 16, 17, 63, 64, 65, 257, 1000, 4097], [1, 16, 65])

    def attention(
        heads: Heads, queries: list[int], contexts: list[int], window: int = 0
    ) -> Callable[[torch.dtype], list[Pair]]:
        return lambda dtype: _attention(
            make_paged(setting, heads, queries, contexts, dtype, num_layers=2, window=window)
        )

    ones = [1] * len(decodes)
    cases = []
    for size, heads in group.items():
        name = f"{size} heads a group, head_dim {heads.head_dim}"
        cases.append(
            Case("paged_attention", f"decodes, {name}", attention(heads, ones, decodes), every_dtype=size == 4)
        )
        if size in (3, 4):
            cases.append(
                Case("paged_attention", f"chunks and decodes, {name}", attention(heads, *mixed), every_dtype=size == 4)
            )
    skewed = setting.size([16500, *decodes], [800, *decodes])
    cases.append(
        Case("paged_attention", f"a decode of {skewed[0]} among short", attention(group[4], [1, *ones], skewed))
    )
    drafts = setting.size([1100, 700, 33], [300, 33, 5])
    cases.append(Case("paged_attention", "drafts", attention(group[4], [5, 8, 3], drafts)))
    for name, heads in {"group 4": group[4], "Phi-3-mini": PHI_MINI, "Gemma 3": GEMMA}.items():
        for window in (0, 64) if heads.head_dim != 128 else (64,):
            seen = f"{name}, window {window}" if window else name
            cases += [
                Case("paged_attention", f"decodes, {seen}", attention(heads, ones, decodes, window=window), False),
                Case("paged_attention", f"chunks and decodes, {seen}", attention(heads, *mixed, window=window), False),
            ]
    return cases


def _attention(paged: Paged) -> list[Pair]:
    paged.run(layer=1)
    expected = torch.full_like(paged.out, torch.nan)
    reference.paged_attention(
        paged.q, paged.cache, 1, paged.block_tables, paged.starts, paged.lengths, expected,
        scale=paged.heads.head_dim**-0.5, window=paged.window,
    )  # fmt: skip
    return [(paged.out, expected)]


def _exact(setting: Setting) -> Iterator[Item]:
    """Checks copies of blocks, in a cache that is too large for 32-bit offsets, and the greedy choice."""
    width, num_blocks = setting.size((1 << 20, 2200), (1 << 9, 20))
    device = setting.device
    cache = torch.empty(num_blocks, width, dtype=torch.bfloat16, device=device).normal_()
    ids = torch.cat((torch.tensor([num_blocks - 1]), torch.randperm(num_blocks - 1)[: num_blocks // 2])).to(device)
    gathered = torch.full((len(ids), width), torch.nan, dtype=torch.bfloat16, device=device)
    block_copy.gather_blocks(cache, ids, gathered)
    scattered, pulled = torch.zeros_like(cache), torch.zeros_like(cache)
    block_copy.scatter_blocks(gathered, scattered, ids)
    block_copy.pull_blocks(cache, ids, pulled, ids)
    expected = torch.zeros_like(cache)
    expected[ids] = cache[ids]
    logits = torch.randn(setting.size((64, 128256), (3, 5000)), device=device)
    chosen = torch.full((len(logits),), -1, dtype=torch.int32, device=device)
    sampling.greedy(logits, chosen)
    same = {
        "gather_blocks": torch.equal(gathered, cache[ids]),
        "scatter_blocks": torch.equal(scattered, expected),
        "pull_blocks": torch.equal(pulled, expected),
        "greedy": torch.equal(chosen.long(), logits.argmax(dim=1)),
    }
    yield Table("exact", (Column("kernel"), Column("equal")), [(name, str(equal)) for name, equal in same.items()])
    for name, equal in same.items():
        if not equal:
            yield Problem(f"{name}: not what the reference gives")


def _sampling(setting: Setting) -> Iterator[Item]:
    """Compares the device's penalties, filters and draws with `engine/sampling.py` on the same logits."""
    num_rows, vocab_size, num_known = setting.size((96, 128256, 900), (8, 5000, 20))
    options: list[dict[str, float]] = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 0.6, "top_k": 40, "top_p": 0.8},
        {"top_p": 0.999, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": -0.5},
    ]
    random = np.random.default_rng(setting.seed)
    logits = (random.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    token_ids = random.integers(0, vocab_size // 4, (num_rows, num_known)).astype(np.int32)
    table = SamplingMetadata(num_rows)
    for row in range(num_rows):
        fields: dict[str, Any] = {
            "temperature": 1.0,
            **options[row % len(options)],
            "seed": int(random.integers(2**63)),
        }
        table.put(row, SamplingParams(**fields), base=row - num_known // 2, eos_token_ids=())
    contexts = Contexts(
        np.arange(num_rows, dtype=np.int32), np.full(num_rows, num_known, np.int32), token_ids, token_ids[:, -1].copy()
    )
    expected, _ = on_cpu.sample_tokens(torch.from_numpy(logits.copy()), table, contexts)
    chosen = _choose_on_device(setting, torch.from_numpy(logits).to(setting.device), table, contexts)
    num_unlike = int((chosen != expected).sum())
    columns = Column("rows"), Column("vocabulary"), Column("other token")
    yield Table("penalise and sample against the CPU", columns, [(num_rows, vocab_size, num_unlike)])
    # The device's exp differs in the last bit, so once in a while a draw falls on the other side of an edge.
    if num_unlike > num_rows // 50:
        yield Problem(f"sample: {num_unlike} of {num_rows} rows chose another token than the CPU")


def _choose_on_device(setting: Setting, logits: torch.Tensor, table: SamplingMetadata, contexts: Contexts) -> Int32:
    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(setting.device)

    rows, num_known, token_ids, last = (put(array) for array in contexts)
    sampling.penalise(
        logits,
        torch.empty(logits.shape, dtype=torch.int32, device=setting.device),
        token_ids=token_ids,
        rows=rows,
        num_known=num_known,
        last=last,
        answer_bases=put(table.answer_bases),
        repetitions=put(table.repetitions),
        presences=put(table.presences),
        frequencies=put(table.frequencies),
    )
    out = torch.full((len(logits),), -1, dtype=torch.int32, device=setting.device)
    sampling.sample(
        logits,
        temperatures=put(table.temperatures),
        top_ks=put(table.top_ks),
        top_ps=put(table.top_ps),
        min_ps=put(table.min_ps),
        seeds=put(table.seeds.view(np.int64)),
        indices=put(table.answer_bases.astype(np.int64) + contexts.num_known),
        out=out,
    )
    return out.cpu().numpy()


def _poisoned_pair(like: torch.Tensor) -> Pair:
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device), torch.full(
        like.shape, torch.nan, dtype=like.dtype, device=like.device
    )
