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
from typing import Any, Protocol, cast

import torch
from llvmlite import ir
from numba import prange
from numba.core import cgutils
from numba.extending import register_jitable

from engine.models.config import INT8_GROUP as GROUP
from engine.models.quantized import Int8Weight
from engine.runners import cpu_matmul, cpu_simd
from engine.runners.cpu_matmul import (
    BLOCK_ROWS,
    BLOCK_TERMS,
    FEW_ROWS,
    MOST_ROWS,
    PAIRS,
    PANEL,
    PLACED_ALONE,
    SHARES,
    WIDE,
    Matmul,
    scratch,
    scratch_bytes,
)
from engine.runners.cpu_simd import INT64, VECTOR, WIDTH, WORDS, Kind, make_copy, make_round
from jit.kernel_cache import compiled, variant

SOURCES = (__file__, cpu_matmul.__file__, cpu_simd.__file__)

GROUP_BYTES = GROUP * PANEL + 2 * PANEL
"""Of one group of a panel: values [GROUP, PANEL], then scales [PANEL]."""
BYTES = ir.VectorType(ir.IntType(8), WIDTH)
WIDENED_TERMS = 1 << 17
"""About as many weights are widened at a time: their 512 KiB stay in the L2 cache, and torch's call pays."""
KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


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


def _pitch(*, pairs: bool) -> int:
    """4-byte words of a row of one block of x; 64 bytes more, so that rows do not meet in one set of the cache."""
    return BLOCK_TERMS // (2 if pairs else 1) + 16


@functools.cache
def make_matmul(kind: Kind, *, pairs: bool = PAIRS, wide: bool = WIDE) -> Matmul:
    """x is of `kind`. out: bf16 [rows, num_out] if that is its kind, else float32 [rows, PANEL times the panels]."""
    pairs = pairs and kind == "bf16"
    KEY = f"{kind}_{'pairs' if pairs else 'widened'}_{'wide' if wide else 'narrow'}"
    PITCH, PANEL_BYTES, BLOCK_GROUPS = 4 * _pitch(pairs=pairs), 4 * PANEL, BLOCK_TERMS // GROUP
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
    PITCH, X_BYTES, STEP_BYTES = 4 * _pitch(pairs=pairs), 4 if kind == "f32" else 2, (2 if pairs else 4) * GROUP
    place = make_copy(2 * GROUP) if pairs else cpu_simd.make_widen_row(GROUP, kind)

    def place_row(x: int, num_in: int, to: int, rows: int) -> None:
        """A row of x into its place in each of the blocks, which have `rows` rows."""
        for term in range(0, num_in, GROUP):
            block = term // BLOCK_TERMS
            place(x + term * X_BYTES, to + block * rows * PITCH + (term - block * BLOCK_TERMS) // GROUP * STEP_BYTES)

    return cast(Callable[[int, int, int, int], None], register_jitable(variant(place_row, key)))


def _make_add_block(pairs: bool, wide: bool, key: str) -> Callable[[int, int, int, int, int], None]:
    PITCH, PANEL_BYTES = 4 * _pitch(pairs=pairs), 4 * PANEL
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


def make_group_tiles(most_rows: int, vectors: tuple[int, ...], *, pairs: bool) -> Any:
    """piece(rows, x, panel, sums, n), for 1 to `most_rows` rows: sums [rows, PANEL] += the products of n groups, in
    float32, in these of a panel's vectors of 16 outputs.

    x: rows `_pitch` 4-byte words apart; a word is two bf16 if `pairs`, else one float32.
    """
    add, pitch = _add_pairs if pairs else _add_terms, 4 * _pitch(pairs=pairs)

    def emit_rows(builder: Any, rows: int, x: Any, panel: Any, sums: Any, n: Any) -> None:
        zero = ir.Constant(VECTOR, [0.0] * WIDTH)
        places = [[cgutils.alloca_once(builder, VECTOR) for _ in vectors] for _ in range(rows)]
        with cgutils.for_range(builder, n) as groups:
            group = builder.add(panel, builder.mul(groups.index, ir.Constant(INT64, GROUP_BYTES)))
            first = builder.add(x, builder.mul(groups.index, ir.Constant(INT64, (2 if pairs else 4) * GROUP)))
            for row in places:
                for place in row:
                    builder.store(zero, place)
            with cgutils.for_range(builder, _opaque(builder, GROUP // 2)) as loop:
                terms = builder.add(first, builder.mul(loop.index, ir.Constant(INT64, 4 if pairs else 8)))
                values = builder.add(group, builder.mul(loop.index, ir.Constant(INT64, 2 * PANEL)))
                cpu_simd._prefetch(builder, values, cpu_simd.AHEAD)
                wide = [[_load_int8(builder, values, odd * PANEL + v * WIDTH) for odd in (0, 1)] for v in vectors]
                add(builder, terms, wide, pitch, places)
            cpu_simd._prefetch(builder, group, cpu_simd.AHEAD + GROUP * PANEL)
            scales = [cpu_simd._load_halves(builder, group, GROUP * PANEL + 2 * WIDTH * v) for v in vectors]
            for r, row in enumerate(places):
                for v, place, scale in zip(vectors, row, scales, strict=True):
                    at = 4 * (r * PANEL + v * WIDTH)
                    total = cpu_simd._load(builder, sums, at)
                    total = cpu_simd._fma(builder, builder.load(place, typ=VECTOR), scale, total)
                    cpu_simd._store(builder, total, sums, at)

    def emit(builder: Any, rows: Any, x: Any, panel: Any, sums: Any, n: Any) -> None:
        done = builder.append_basic_block("groups.done")
        choice = builder.switch(rows, done)
        for num in range(1, most_rows + 1):
            block = builder.append_basic_block(f"groups.{num}")
            choice.add_case(ir.Constant(INT64, num), block)
            builder.position_at_end(block)
            emit_rows(builder, num, x, panel, sums, n)
            builder.branch(done)
        builder.position_at_end(done)

    return cpu_simd._piece(5, emit)


def _opaque(builder: Any, number: int) -> Any:
    """A number of turns that the compiler does not know: it would unroll the loop, into more code than the CPU's cache
    of decoded instructions holds for all numbers of rows.
    """
    kind = ir.FunctionType(INT64, [INT64])
    return builder.asm(kind, "", "=r,0", [ir.Constant(INT64, number)], False)


def _load_int8(builder: Any, address: Any, num_bytes: int) -> Any:
    """16 int8 as float32."""
    values = builder.load(cpu_simd._at(builder, address, num_bytes, BYTES), align=1, typ=BYTES)
    return builder.sitofp(builder.sext(values, WORDS), VECTOR)


def _add_terms(builder: Any, x: Any, wide: list[list[Any]], pitch: int, places: list[list[Any]]) -> None:
    """Two terms of each row of x, `pitch` bytes apart, by the weights of each vector."""
    for odd in (0, 1):
        for r, row in enumerate(places):
            term = cpu_simd._splat(builder, x, r * pitch + 4 * odd)
            for place, weights in zip(row, wide, strict=True):
                total = builder.load(place, typ=VECTOR)
                builder.store(cpu_simd._fma(builder, term, weights[odd], total), place)


def _add_pairs(builder: Any, x: Any, wide: list[list[Any]], pitch: int, places: list[list[Any]]) -> None:
    """As `_add_terms`, by the instruction that multiplies bf16 in pairs: the upper halves of the weights' float32,
    whose lower halves are zero.
    """
    add_products, pairs = cpu_simd._pair_products(builder), []
    for even, odd in wide:
        low = builder.lshr(builder.bitcast(even, WORDS), ir.Constant(WORDS, [16] * WIDTH))
        pairs.append(builder.bitcast(builder.or_(low, builder.bitcast(odd, WORDS)), cpu_simd.PAIRS))
    for r, row in enumerate(places):
        terms = builder.bitcast(cpu_simd._splat(builder, x, r * pitch), cpu_simd.PAIRS)
        for place, weights in zip(row, pairs, strict=True):
            builder.store(builder.call(add_products, [builder.load(place, typ=VECTOR), terms, weights]), place)


class WidenPanels(Protocol):
    """out [num_in, columns] float32 = the transposed weights of the panels from address `panels` on, by `num_bins`
    threads; `out` is an address.
    """

    def __call__(self, panels: int, num_in: int, num_panels: int, out: int, num_bins: int) -> None: ...


@functools.cache
def make_widen_panels() -> WidenPanels:
    PANEL_BYTES = 4 * PANEL

    def emit(builder: Any, group: Any, out: Any, row_bytes: Any) -> None:
        for v in range(PANEL // WIDTH):
            scale = cpu_simd._load_halves(builder, group, GROUP * PANEL + 2 * WIDTH * v)
            with cgutils.for_range(builder, ir.Constant(INT64, GROUP)) as loop:
                values = builder.add(group, builder.mul(loop.index, ir.Constant(INT64, PANEL)))
                to = builder.add(out, builder.mul(loop.index, row_bytes))
                wide = builder.fmul(_load_int8(builder, values, v * WIDTH), scale)
                cpu_simd._store(builder, wide, to, 4 * WIDTH * v)

    widen_group = cpu_simd._piece(3, emit)

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
        wide = x.float()
        out = self._bias.repeat(len(x), 1)
        step = max(1, WIDENED_TERMS // (self._num_in * PANEL))
        weights = torch.empty(self._num_in * step * PANEL)
        for first in range(0, self._num_panels, step):
            num = min(step, self._num_panels - first)
            here = weights[: self._num_in * num * PANEL].view(self._num_in, num * PANEL)
            self._widen_panels(
                self._panels[first].data_ptr(), self._num_in, num, here.data_ptr(), min(num, self._num_bins)
            )
            out[:, first * PANEL : (first + num) * PANEL].addmm_(wide, here)
        return out[:, : self._num_out].to(self._dtype).contiguous()
