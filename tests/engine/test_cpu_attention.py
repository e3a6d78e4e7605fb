"""The compiled attention against `engine/kernels/reference.py`: rotation, cache, windows, prompt tiles and decodes."""

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.kernels import reference
from engine.runners.cpu_attention import KEY_TILE, Shape, make_attention, scratch_elements, tile_rows
from engine.runners.cpu_elements import Stored
from engine.runners.cpu_simd import WIDE, Kind
from engine.runners.numba_ops import work_items
from engine.runners.step_plan import StepPlan
from tests.engine.test_torch_runner_golden import AVX2_ONLY
from tests.hang import HANG_S

NUM_LAYERS, LAYER, NUM_BINS = 2, 1, 2
TOLERANCE = {"f32": 3e-5, "f16": 1.3e-3, "bf16": 1e-2}
"""Of the length of one head's result. bf16 rounds k, v and the result to 8 bits, float16 to 11."""
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Step(NamedTuple):
    """Sequence b brings queries[b] tokens, at least one, and has contexts[b] in the cache."""

    queries: list[int]
    contexts: list[int]


def plan_of(step: Step, tables: torch.Tensor, block_size: int) -> StepPlan:
    positions, slots, none = [], [], np.zeros(0, np.int64)
    for table, num, context in zip(tables.tolist(), *step, strict=True):
        for position in range(context - num, context):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    return StepPlan(
        token_ids=none, positions=np.array(positions), slots=np.array(slots), starts=np.cumsum([0, *step.queries]),
        contexts=np.array(step.contexts), block_tables=tables.numpy(), sampled=none, num_drafts=none,
        sampled_tokens=none,
    )  # fmt: skip


def stored(tensor: torch.Tensor) -> Stored:
    views = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    array: Stored = tensor.view(views.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def compare(step: Step, shape: Shape, *, window: int = 0, num_kv_heads: int = 2, scale: float | None = None) -> None:
    """What no sequence owns of the cache is NaN: keys outside the window are read by nobody, wrong blocks show."""
    torch.manual_seed(4)
    D, BS, num_heads = shape.head_dim, shape.block_size, shape.group * num_kv_heads
    dtype = DTYPES[shape.kind]
    per_sequence = [-(-context // BS) for context in step.contexts]
    ids = (torch.randperm(sum(per_sequence)) + 1).split(per_sequence)
    tables = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(torch.int32)
    memory = torch.randn(sum(per_sequence) + 1, num_kv_heads, NUM_LAYERS, 2, BS, D).to(dtype)
    cache = memory.permute(0, 2, 3, 1, 4, 5)
    cache[0] = torch.nan
    for table, num, context in zip(tables, *step, strict=True):
        for block in range(max(0, context - num + 1 - window) // BS if window else 0):
            cache[table[block]] = torch.nan
    plan = plan_of(step, tables, BS)
    qkv = (2 * torch.randn(sum(step.queries), (num_heads + 2 * num_kv_heads) * D)).to(dtype)
    angles = 6.3 * torch.rand(max(step.contexts), shape.rotary_dim // 2)
    cos, sin, scale = angles.cos(), angles.sin(), scale or D**-0.5
    expected, expected_cache = torch.full((len(qkv), num_heads, D), torch.nan, dtype=torch.float64), cache.clone()
    q = torch.empty(len(qkv), num_heads, D, dtype=torch.float64)
    reference.rope_and_cache(
        qkv, cos, sin, torch.from_numpy(plan.positions), torch.from_numpy(plan.slots), expected_cache, LAYER, q
    )
    reference.paged_attention(
        q, expected_cache, LAYER, tables, torch.from_numpy(plan.starts), torch.tensor(step.contexts), expected,
        scale=scale, window=window,
    )  # fmt: skip
    out = torch.full((len(qkv), num_heads * D), torch.nan, dtype=dtype)
    items, bins = work_items(plan, num_kv_heads, tile_rows(shape.group) // shape.group, NUM_BINS, window)
    make_attention(shape)(
        qkv=stored(qkv), layer=LAYER, cache=stored(memory), q=np.zeros((len(qkv), num_heads * D), np.float32),
        out=stored(out), positions=plan.positions, slots=plan.slots, cos=cos.numpy(), sin=sin.numpy(), items=items,
        bins=bins, tables=plan.block_tables, window=window, scale=scale,
        work=np.full((NUM_BINS, scratch_elements(D, shape.group)), np.nan, np.float32),
    )  # fmt: skip
    torch.testing.assert_close(
        cache, expected_cache, rtol={"f32": 1e-6, "f16": 1e-3, "bf16": 0.01}[shape.kind], atol=1e-6, equal_nan=True
    )
    ours = out.view(expected.shape).double()
    error = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert not ours.isnan().any() and error.max() < TOLERANCE[shape.kind], f"error {error.max():.2e}"


MIXED = Step([40, 1, 1, 33, 3, 150, 1], [40, 300, 1, 200, 130, 290, 129])
"""First chunks, later ones, drafts behind a decode; tiles of 32 tokens at a group of 3, of 96 at a group of 1."""


def shape_of(head_dim: int = 64, group: int = 3, block_size: int = 16, kind: Kind = "f32", rotary: int = -1) -> Shape:
    return Shape(head_dim, group, block_size, kind, head_dim if rotary < 0 else rotary)


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(16, 2, rotary=0),
        shape_of(32, 1, kind="bf16", rotary=0),
        shape_of(32, 12, kind="bf16"),
        shape_of(64, 3),
        shape_of(64, 3, kind="bf16"),
        shape_of(96, 1, rotary=72),
        shape_of(96, 1, kind="bf16", rotary=72),
        shape_of(96, 1, kind="f16", rotary=72),
        shape_of(128, 4, kind="f16"),
        shape_of(128, 4, kind="bf16"),
        shape_of(256, 4),
        shape_of(256, 4, kind="bf16"),
    ],
    ids=lambda shape: shape.key,
)
@pytest.mark.parametrize("window", [0, 48])
def test_shapes(shape: Shape, window: int) -> None:
    """Each takes seconds to compile; those that are rotated in part, or not at all, are among them."""
    compare(MIXED, shape, window=window)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 127, 128, 129, 200, 299, 300, 301, 5000])
def test_windows_end_at_before_and_after_every_edge(window: int) -> None:
    """Of blocks, of the tiles of 128 keys, of contexts."""
    assert KEY_TILE == 128
    compare(MIXED, shape_of(), window=window)


@pytest.mark.parametrize("window", [1, 100, 128])
def test_decodes_in_a_window_end_at_before_and_after_the_edges(window: int) -> None:
    contexts = [1, 2, 15, 16, 17, 99, 100, 101, 127, 128, 129, 130, 144, 145, 255, 256, 257, 300]
    compare(Step([1] * len(contexts), contexts), shape_of(), window=window)


def test_a_tile_whose_last_tokens_see_nothing_of_its_first_keys() -> None:
    """A tile is 96 tokens here: its last ones begin 95 keys behind its first, beyond whole tiles of keys."""
    compare(Step([300, 200], [300, 500]), shape_of(96, 1, rotary=72), window=10)


def test_a_scale_of_its_own() -> None:
    compare(MIXED, shape_of(), scale=0.3)


def test_work_in_a_window_is_shared_out_by_what_it_reads() -> None:
    """Without the window the longest context would count as much as all the others together, and stand alone."""
    step = Step([1] * 5, [400, 100, 100, 100, 100])
    plan = plan_of(step, torch.zeros(5, 25, dtype=torch.int32), 16)
    _, whole = work_items(plan, 1, 32, 2)
    items, bins = work_items(plan, 1, 32, 2, 100)
    assert whole.tolist() == bins.tolist() == [0, 3, 5]
    assert items[:, 3].tolist() == [0, 3, 4, 1, 2]


AVX2_SHAPES = [
    shape_of(16, 2, rotary=0),
    shape_of(32, 12, kind="bf16"),
    shape_of(64, 3),
    shape_of(64, 3, kind="bf16"),
    shape_of(96, 1, kind="bf16", rotary=72),
    shape_of(128, 4, kind="bf16"),
    shape_of(96, 1, kind="f16", rotary=72),
    shape_of(128, 4, kind="f16"),
]


def compare_on_avx2() -> None:
    assert not WIDE
    for shape in AVX2_SHAPES:
        compare(MIXED, shape)
        compare(MIXED, shape, window=48)


@pytest.mark.skipif(not WIDE, reason="this CPU knows no more than AVX2")
def test_the_same_on_a_cpu_that_knows_avx2_alone() -> None:
    """Other tiles of the products, narrower vectors for decodes."""
    command = [sys.executable, "-c", "from tests.engine.test_cpu_attention import *; compare_on_avx2()"]
    subprocess.run(command, env=os.environ | AVX2_ONLY, timeout=HANG_S, check=True)
