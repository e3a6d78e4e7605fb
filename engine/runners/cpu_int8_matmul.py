"""Linears with int8 weights on CPUs as one compiled kernel for all shapes: x in the model's dtype, float32 sums.

Weights lie in panels of PANEL outputs as in cpu_matmul.py, but group by group: GROUP rows, each of one term's int8
values, then the outputs' scales. That is read straight through, and is 17 lines of the cache. Values are widened in
registers, by conversions that are exact. The products of a group are summed without its scales, which only the sums
are multiplied with: once in GROUP terms. Where the CPU multiplies bf16 in pairs, int8 are widened to these, for bf16
holds all of them.

As there, what comes out for a row does not depend on the rows beside it, and where torch's float32 matmul is faster at
many rows, panels are widened for it a few at a time.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from numba import prange
from numba.extending import register_jitable

from engine.models import config
from engine.models.config import INT8_GROUP as GROUP
from engine.models.quantized import Int8Weight
from engine.runners import cpu_int8_simd, cpu_matmul, cpu_simd
from engine.runners.cpu_int8_simd import GROUP_BYTES, make_group_tiles, make_widen_group, pitch_of
from engine.runners.cpu_matmul import (
    BLOCK_ROWS,
    BLOCK_TERMS,
    FEW_ROWS,
    KINDS,
    MOST_ROWS,
    PAIRS,
    PANEL,
    PLACED_ALONE,
    SHARES,
    WIDE,
    Matmul,
    WidenPanels,
    scratch,
    scratch_bytes,
    widened_product,
)
from engine.runners.cpu_simd import Kind, make_copy, make_round
from jit.kernel_cache import compiled, variant

SOURCES = (__file__, config.__file__, cpu_int8_simd.__file__, cpu_matmul.__file__, cpu_simd.__file__)


def pack(weight: Int8Weight, memory: torch.Tensor | None = None) -> torch.Tensor:
    """-> panels uint8 [ceil(out / PANEL), in / GROUP, GROUP_BYTES], with outputs of zeros after the last; in `memory`,
    uint8 [`panel_bytes`], if that is given. The number of inputs is a multiple of GROUP.
    """
    num_out, num_in = weight.values.shape
    num_panels, num_groups, pad = -(-num_out // PANEL), num_in // GROUP, (0, 0, 0, -num_out % PANEL)
    if memory is None:
        memory = torch.empty(panel_bytes(num_out, num_in), dtype=torch.uint8)
    panels = memory.view(num_panels, num_groups, GROUP_BYTES)
    values = torch.nn.functional.pad(weight.values, pad).view(num_panels, PANEL, num_groups, GROUP)
    panels[:, :, : GROUP * PANEL].view(torch.int8).unflatten(2, (GROUP, PANEL)).copy_(values.permute(0, 2, 3, 1))
    scales = torch.nn.functional.pad(weight.scales, pad).view(num_panels, PANEL, num_groups).transpose(1, 2)
    panels[:, :, GROUP * PANEL :].copy_(scales.contiguous().view(torch.uint8))
    return panels


def panel_bytes(num_out: int, num_in: int) -> int:
    return -(-num_out // PANEL) * (num_in // GROUP) * GROUP_BYTES


@functools.cache
def make_matmul(kind: Kind, *, pairs: bool = PAIRS, wide: bool = WIDE) -> Matmul:
    """x is of `kind`. out: bf16 [rows, num_out] if that is its kind, else float32 [rows, PANEL times the panels]."""
    pairs = pairs and kind == "bf16"
    KEY = f"{kind}_{'pairs' if pairs else 'widened'}_{'wide' if wide else 'narrow'}"
    PITCH, PANEL_BYTES, BLOCK_GROUPS = 4 * pitch_of(pairs=pairs), 4 * PANEL, BLOCK_TERMS // GROUP
    X_BYTES, OUT_BYTES = 4 if kind == "f32" else 2, 2 if kind == "bf16" else 4
    place_row, add_block, end_row = _make_place_row(kind, pairs, KEY), _make_add_block(pairs, wide, KEY), _end(kind)
    begin = make_copy(PANEL_BYTES)

    def int8_matmul(
        x: int, num_rows: int, num_in: int, panels: int, num_out: int, bias: int, out: int, work: int, num_bins: int
    ) -> None:
        num_panels, num_groups = (num_out + PANEL - 1) // PANEL, num_in // GROUP
        num_blocks = (num_in + BLOCK_TERMS - 1) // BLOCK_TERMS
        out_pitch = OUT_BYTES * (num_out if OUT_BYTES == 2 else num_panels * PANEL)
        for start in range(0, num_rows, MOST_ROWS):
            placed = min(MOST_ROWS, num_rows - start)
            if placed < PLACED_ALONE:
                for r in range(placed):
                    place_row(x + (start + r) * num_in * X_BYTES, num_in, work + r * PITCH, placed)
            else:
                for r in prange(placed):
                    place_row(x + (start + r) * num_in * X_BYTES, num_in, work + r * PITCH, placed)
            groups = max(
                (placed + BLOCK_ROWS - 1) // BLOCK_ROWS, min(placed // FEW_ROWS, SHARES * num_bins // num_panels)
            )
            for b in prange(num_bins):
                sums = work + placed * num_blocks * PITCH + b * min(BLOCK_ROWS, num_rows) * PANEL_BYTES
                for item in range(groups * num_panels * b // num_bins, groups * num_panels * (b + 1) // num_bins):
                    group, p = item // num_panels, item % num_panels
                    first = placed * group // groups
                    rows = placed * (group + 1) // groups - first
                    for r in range(rows):
                        begin(bias + p * PANEL_BYTES, sums + r * PANEL_BYTES)
                    for block in range(num_blocks):
                        terms, at = block * placed + first, block * BLOCK_GROUPS
                        n = min(BLOCK_GROUPS, num_groups - at)
                        add_block(rows, work + terms * PITCH, panels + (p * num_groups + at) * GROUP_BYTES, sums, n)
                    to = out + (start + first) * out_pitch + p * PANEL * OUT_BYTES
                    for r in range(rows):
                        end_row(sums + r * PANEL_BYTES, to + r * out_pitch, min(PANEL, num_out - p * PANEL))

    return compiled(SOURCES, KEY)(int8_matmul)


def _end(kind: Kind) -> Callable[[int, int, int], None]:
    if kind == "bf16":
        return cast(Callable[[int, int, int], None], make_round(PANEL))
    copy = make_copy(4 * PANEL)

    def end_row(sums: int, to: int, n: int) -> None:
        copy(sums, to)

    return cast(Callable[[int, int, int], None], register_jitable(variant(end_row, kind)))


def _make_place_row(kind: Kind, pairs: bool, key: str) -> Callable[[int, int, int, int], None]:
    PITCH, X_BYTES, STEP_BYTES = 4 * pitch_of(pairs=pairs), 4 if kind == "f32" else 2, (2 if pairs else 4) * GROUP
    place = make_copy(2 * GROUP) if pairs else cpu_simd.make_widen_row(GROUP, kind)

    def place_row(x: int, num_in: int, to: int, rows: int) -> None:
        """A row of x into its place in each of the blocks, which have `rows` rows."""
        for term in range(0, num_in, GROUP):
            block = term // BLOCK_TERMS
            place(x + term * X_BYTES, to + block * rows * PITCH + (term - block * BLOCK_TERMS) // GROUP * STEP_BYTES)

    return cast(Callable[[int, int, int, int], None], register_jitable(variant(place_row, key)))


def _make_add_block(pairs: bool, wide: bool, key: str) -> Callable[[int, int, int, int, int], None]:
    PITCH, PANEL_BYTES = 4 * pitch_of(pairs=pairs), 4 * PANEL
    FEW, TILE = (12, 12) if wide else (3, 6)
    whole = make_group_tiles(FEW, (0, 1), pairs=pairs)
    low, high = (whole, whole) if wide else (make_group_tiles(TILE, (v,), pairs=pairs) for v in (0, 1))

    def add_block(rows: int, x: int, panel: int, sums: int, num_groups: int) -> None:
        """Adds the products of some groups to the sums of a panel, in tiles of about equally many rows: of the whole
        panel where the sums of all rows fit into registers, else of one half after the other.
        """
        if wide or rows <= FEW:
            tiles = (rows + FEW - 1) // FEW
            for t in range(tiles):
                r = rows * t // tiles
                whole(rows * (t + 1) // tiles - r, x + r * PITCH, panel, sums + r * PANEL_BYTES, num_groups)
        else:
            tiles = (rows + TILE - 1) // TILE
            for t in range(tiles):
                r = rows * t // tiles
                n, terms, to = rows * (t + 1) // tiles - r, x + r * PITCH, sums + r * PANEL_BYTES
                low(n, terms, panel, to, num_groups)
                high(n, terms, panel, to, num_groups)

    return cast(Callable[[int, int, int, int, int], None], register_jitable(variant(add_block, key)))


@functools.cache
def make_widen_panels() -> WidenPanels:
    widen_group, PANEL_BYTES = make_widen_group(), 4 * PANEL

    def widen_int8_panels(panels: int, num_in: int, num_panels: int, out: int, num_bins: int) -> None:
        num_groups, row_bytes = num_in // GROUP, num_panels * PANEL_BYTES
        for b in prange(num_bins):
            for p in range(num_panels * b // num_bins, num_panels * (b + 1) // num_bins):
                for g in range(num_groups):
                    at = panels + (p * num_groups + g) * GROUP_BYTES
                    widen_group(at, out + g * GROUP * row_bytes + p * PANEL_BYTES, row_bytes)

    return compiled(SOURCES)(widen_int8_panels)


class Int8PanelLinear:
    """[T, in] -> [T, out], both in the model's dtype. Holds the weights in panels alone, and may be called by several
    threads.
    """

    def __init__(
        self,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        num_out: int,
        dtype: torch.dtype,
        num_threads: int,
        widened_from: int,
    ) -> None:
        """From `widened_from` rows on torch multiplies, in float32."""
        self._panels, self._num_out, self._dtype = panels, num_out, dtype
        self._num_bins, self._widened_from = num_threads, widened_from
        self._num_panels, num_groups, _ = panels.shape
        self._num_in = GROUP * num_groups
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[:num_out] = bias
        self._addresses = panels.data_ptr(), self._bias.data_ptr()
        self._matmul, self._widen_panels = make_matmul(KINDS[dtype]), make_widen_panels()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows >= self._widened_from:
            return self._widened(x)
        rounds = self._dtype is torch.bfloat16
        columns = self._num_out if rounds else self._num_panels * PANEL
        out = torch.empty(num_rows, columns, dtype=torch.bfloat16 if rounds else torch.float32)
        x, num_in, (panels, bias) = x.contiguous(), self._num_in, self._addresses
        work = scratch.address(scratch_bytes(num_rows, num_in, self._num_bins))
        self._matmul(x.data_ptr(), num_rows, num_in, panels, self._num_out, bias, out.data_ptr(), work, self._num_bins)
        return out if rounds else out[:, : self._num_out].to(self._dtype).contiguous()

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        out = widened_product(x, self._panels, self._bias, self._widen_panels, self._num_bins)
        return out[:, : self._num_out].to(self._dtype).contiguous()
