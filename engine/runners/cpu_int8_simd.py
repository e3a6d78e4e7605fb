"""The vector code of int8 linears, emitted as that of the other CPU kernels (cpu_simd.py)."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.models.config import INT8_GROUP as GROUP
from engine.runners import cpu_simd
from engine.runners.cpu_matmul import BLOCK_TERMS, PANEL
from engine.runners.cpu_simd import INT64, VECTOR, WIDTH, WORDS

GROUP_BYTES = GROUP * PANEL + 2 * PANEL
"""Of one group of a panel: int8 values [GROUP, PANEL], then float16 scales [PANEL]."""
BYTES = ir.VectorType(ir.IntType(8), WIDTH)


def pitch_of(*, pairs: bool) -> int:
    """4-byte words of a row of one block of x; 64 bytes more, so that rows do not meet in one set of the cache."""
    return BLOCK_TERMS // (2 if pairs else 1) + 16


def make_group_tiles(most_rows: int, vectors: tuple[int, ...], *, pairs: bool) -> Any:
    """piece(rows, x, panel, sums, n), for 1 to `most_rows` rows: sums [rows, PANEL] += the products of n groups, in
    float32, in these of a panel's vectors of 16 outputs.

    x: rows `pitch_of` 4-byte words apart; a word is two bf16 if `pairs`, else one float32.
    """
    add, pitch = _add_pairs if pairs else _add_terms, 4 * pitch_of(pairs=pairs)

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


def make_widen_group() -> Any:
    """piece(group, out, row_bytes): out [GROUP, PANEL] float32, rows `row_bytes` apart: the weights of a group."""

    def emit(builder: Any, group: Any, out: Any, row_bytes: Any) -> None:
        for v in range(PANEL // WIDTH):
            scale = cpu_simd._load_halves(builder, group, GROUP * PANEL + 2 * WIDTH * v)
            with cgutils.for_range(builder, ir.Constant(INT64, GROUP)) as loop:
                values = builder.add(group, builder.mul(loop.index, ir.Constant(INT64, PANEL)))
                to = builder.add(out, builder.mul(loop.index, row_bytes))
                wide = builder.fmul(_load_int8(builder, values, v * WIDTH), scale)
                cpu_simd._store(builder, wide, to, 4 * WIDTH * v)

    return cpu_simd._piece(3, emit)
