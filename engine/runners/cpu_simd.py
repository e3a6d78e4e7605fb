"""Straight-line SIMD pieces for the CPU kernels, emitted as LLVM vector code and called from numba functions like any
other function.

Every argument is an address (int64, bytes). float32 everywhere, but for keys and values in the cache: those are of the
cache's element type, bf16 or float32, and are widened as they are loaded. Vectors are 16 wide; LLVM splits them where
the CPU's are narrower.

The file is longer than 300 lines because it is the one place in which vector code is emitted.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

WIDTH = 16
FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, WIDTH)
FUSE = ("contract",)

EXP2 = (1.0, 0.6931469775992, 0.2402224208538, 0.05550733743251, 0.009671512639652, 0.00132647271974)
"""2 ** f on [-1/2, 1/2] by the polynomial of degree 5 whose relative error is smallest, 9.1e-8, of those that are 1 at
0; lowest power first.
"""

class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)


def _at(builder: Any, address: Any, num_bytes: int, element: Any) -> Any:
    moved = builder.add(address, ir.Constant(INT64, num_bytes)) if num_bytes else address
    return builder.inttoptr(moved, element.as_pointer())


def _load(builder: Any, address: Any, num_bytes: int, element: Any = VECTOR) -> Any:
    return builder.load(_at(builder, address, num_bytes, element), align=4, typ=element)


def _store(builder: Any, value: Any, address: Any, num_bytes: int) -> None:
    builder.store(value, _at(builder, address, num_bytes, value.type), align=4)


def _load_wide(builder: Any, address: Any, first: int, bf16: bool) -> Any:
    """16 cache elements from element `first` on, as float32."""
    if not bf16:
        return _load(builder, address, first * 4)
    half = ir.VectorType(ir.IntType(16), WIDTH)
    words = builder.load(_at(builder, address, first * 2, half), align=2, typ=half)
    whole = ir.VectorType(INT32, WIDTH)
    return builder.bitcast(builder.shl(builder.zext(words, whole), ir.Constant(whole, [16] * WIDTH)), VECTOR)


def _splat(builder: Any, address: Any, num_bytes: int) -> Any:
    return _spread(builder, _load(builder, address, num_bytes, FLOAT))


def _spread(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(INT32, 0))
    return _pick(builder, one, one, [0] * WIDTH)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 127; 2 ** -126 for anything smaller than -126."""
    whole_numbers = ir.VectorType(INT32, WIDTH)

    def constant(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * WIDTH)

    x = _larger(builder, x, constant(-126.0))
    name, kind = f"llvm.roundeven.v{WIDTH}f32", ir.FunctionType(VECTOR, [VECTOR])
    whole = builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [x])
    f = builder.fsub(x, whole)
    power = constant(EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power = _fma(builder, power, f, constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, whole_numbers), ir.Constant(whole_numbers, [23] * WIDTH))
    return builder.bitcast(builder.add(builder.bitcast(power, whole_numbers), exponent), VECTOR)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def _lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """Sum over the lanes of each of n vectors (n a power of two, at most 16), as one vector of n floats: neighbours
    added pairwise.
    """
    num = len(vectors)
    while len(vectors) > 1:
        even, odd = list(range(0, 2 * WIDTH, 2)), list(range(1, 2 * WIDTH, 2))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(_pick(builder, a, b, even), _pick(builder, a, b, odd)) for a, b in pairs]
    total, width = vectors[0], WIDTH
    while width > num:
        total = builder.fadd(
            _pick(builder, total, total, list(range(0, width, 2))),
            _pick(builder, total, total, list(range(1, width, 2))),
        )
        width //= 2
    return total


def has_feature(name: str) -> bool:
    """Whether code is made for CPUs with this one, as LLVM calls it."""
    return f"+{name}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


PRODUCT_ROWS, PRODUCT_COLUMNS = (8, 32) if has_feature("avx512f") else (6, 16)
"""Of one `product`: its sums fill 16 of the 32 registers of AVX-512, 12 of the 16 of AVX2."""
PRODUCT_TERMS = 4
"""Inner terms that a `product` takes at a time."""


def _piece(num_arguments: int, emit: Callable[..., None]) -> Any:
    """A numba function of `num_arguments` int64 arguments without result, whose body `emit(builder, *arguments)`
    writes.
    """
    signature = types.void(*[types.int64] * num_arguments)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit(builder, *args)
        return context.get_dummy_value()

    if num_arguments == 2:

        @intrinsic
        def two(typingctx: Any, a: Any, b: Any) -> Any:
            return signature, generate

        return two

    if num_arguments == 4:

        @intrinsic
        def four(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            return signature, generate

        return four

    @intrinsic
    def three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, generate

    return three


def make_dot_keys(head_dim: int, group: int, score_stride: int, bf16: bool) -> tuple[Any, int]:
    """(piece, n): piece(q, keys, scores) dots `group` rows of q [group, head_dim] with n rows of cached keys [n,
    head_dim].

    Head g's n results go to scores + g * score_stride floats. n divides 16: as many keys as keep all sums in 24
    registers.
    """
    num = 16
    while num > 1 and num * group > 24:
        num //= 2

    def emit(builder: Any, q: Any, keys: Any, scores: Any) -> None:
        sums: list[list[Any]] = [[None] * num for _ in range(group)]
        for d in range(0, head_dim, WIDTH):
            rows = [_load(builder, q, (g * head_dim + d) * 4) for g in range(group)]
            for j in range(num):
                key = _load_wide(builder, keys, j * head_dim + d, bf16)
                for g in range(group):
                    before = sums[g][j]
                    sums[g][j] = builder.fmul(rows[g], key) if before is None else _fma(builder, rows[g], key, before)
        for g in range(group):
            _store(builder, _lane_sums(builder, sums[g]), scores, g * score_stride * 4)

    return _piece(3, emit), num


def make_weigh_values(head_dim: int, group: int, score_stride: int, bf16: bool, num: int) -> Any:
    """piece(weights, values, acc): acc [group, head_dim] += weights @ values for `num` rows of cached values [num,
    head_dim].

    Head g's `num` weights stand at weights + g * score_stride floats.
    """
    heads = max(1, min(group, 24 * WIDTH // head_dim))

    def emit(builder: Any, weights: Any, values: Any, acc: Any) -> None:
        columns = range(0, head_dim, WIDTH)
        for g0 in range(0, group, heads):
            some = range(g0, min(group, g0 + heads))
            sums = {(g, d): _load(builder, acc, (g * head_dim + d) * 4) for g in some for d in columns}
            for j in range(num):
                weight = {g: _splat(builder, weights, (g * score_stride + j) * 4) for g in some}
                for d in columns:
                    value = _load_wide(builder, values, j * head_dim + d, bf16)
                    for g in some:
                        sums[g, d] = _fma(builder, weight[g], value, sums[g, d])
            for (g, d), total in sums.items():
                _store(builder, total, acc, (g * head_dim + d) * 4)

    return _piece(3, emit)


def make_transpose_keys(head_dim: int, stride: int, bf16: bool) -> Any:
    """piece(keys, out): 16 rows of cached keys [16, head_dim] become out [head_dim, 16], rows `stride` floats apart."""

    def emit(builder: Any, keys: Any, out: Any) -> None:
        for d in range(0, head_dim, WIDTH):
            rows = [_load_wide(builder, keys, j * head_dim + d, bf16) for j in range(WIDTH)]
            for step in (1, 2, 4, 8):
                # exchange the off-diagonal halves of every 2 x 2 square of `step`-wide tiles
                low = [lane if not lane & step else WIDTH + lane - step for lane in range(WIDTH)]
                high = [lane + step if not lane & step else WIDTH + lane for lane in range(WIDTH)]
                for i in range(WIDTH):
                    if not i & step:
                        a, b = rows[i], rows[i + step]
                        rows[i], rows[i + step] = _pick(builder, a, b, low), _pick(builder, a, b, high)
            for i, row in enumerate(rows):
                _store(builder, row, out, (d + i) * stride * 4)

    return _piece(2, emit)


def make_widen_row(head_dim: int, bf16: bool) -> Any:
    """piece(row, out): head_dim cache elements as float32."""

    def emit(builder: Any, row: Any, out: Any) -> None:
        for d in range(0, head_dim, WIDTH):
            _store(builder, _load_wide(builder, row, d, bf16), out, d * 4)

    return _piece(2, emit)


def make_softmax_step(head_dim: int, total_bytes: int) -> Any:
    """piece(scores, peak, acc, num): one more tile of `num` scores, a multiple of 32, for one query row, which becomes
    weights 2 ** (score - peak). What was summed so far, acc [head_dim] and the total, is rescaled to the new peak.

    The row's total stands `total_bytes` behind its peak. A weight is at least 2 ** -126.
    """
    pair = range(2)

    def emit(builder: Any, scores: Any, peak: Any, acc: Any, num: Any) -> None:
        steps = builder.udiv(num, ir.Constant(INT64, 2 * WIDTH))
        before, before_total = _load(builder, peak, 0, FLOAT), _load(builder, peak, total_bytes, FLOAT)
        highest = [cgutils.alloca_once_value(builder, _spread(builder, before)) for _ in pair]
        with cgutils.for_range(builder, steps) as loop:
            at = builder.add(scores, builder.mul(loop.index, ir.Constant(INT64, 8 * WIDTH)))
            for i in pair:
                score = _load(builder, at, 4 * WIDTH * i)
                builder.store(_larger(builder, builder.load(highest[i], typ=VECTOR), score), highest[i])
        top = _larger(builder, *(builder.load(place, typ=VECTOR) for place in highest))
        for step in (8, 4, 2, 1):
            top = _larger(builder, top, _pick(builder, top, top, [lane ^ step for lane in range(WIDTH)]))
        sums = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * WIDTH)) for _ in pair]
        with cgutils.for_range(builder, steps) as loop:
            at = builder.add(scores, builder.mul(loop.index, ir.Constant(INT64, 8 * WIDTH)))
            for i in pair:
                weight = _exp2(builder, builder.fsub(_load(builder, at, 4 * WIDTH * i), top))
                _store(builder, weight, at, 4 * WIDTH * i)
                builder.store(builder.fadd(builder.load(sums[i], typ=VECTOR), weight), sums[i])
        added = builder.fadd(*(builder.load(place, typ=VECTOR) for place in sums))
        for step in (8, 4, 2, 1):
            added = builder.fadd(added, _pick(builder, added, added, [lane ^ step for lane in range(WIDTH)]))
        first = ir.Constant(INT32, 0)
        after, total = builder.extract_element(top, first), builder.extract_element(added, first)
        builder.store(after, _at(builder, peak, 0, FLOAT))
        scale = _exp2(builder, builder.fsub(_spread(builder, before), top))
        kept = builder.fmul(before_total, builder.extract_element(scale, first))
        builder.store(builder.fadd(kept, total), _at(builder, peak, total_bytes, FLOAT))
        with builder.if_then(builder.fcmp_ordered(">", after, before)):
            for d in range(0, head_dim, WIDTH):
                _store(builder, builder.fmul(_load(builder, acc, 4 * d), scale), acc, 4 * d)

    return _piece(4, emit)


def make_product(num_columns: int, a_stride: int, b_stride: int, c_stride: int, *, add: bool) -> Any:
    """piece(a, b, c, num_terms): c [PRODUCT_ROWS, num_columns] = a [PRODUCT_ROWS, num_terms] @ b [num_terms,
    num_columns], added to what stands there if `add`. Rows of each lie their stride (in floats) apart.

    num_columns: 16, or PRODUCT_COLUMNS, so that c stays in registers. num_terms: a multiple of PRODUCT_TERMS.
    """
    columns = range(0, num_columns, WIDTH)

    def emit(builder: Any, a: Any, b: Any, c: Any, num_terms: Any) -> None:
        zero = ir.Constant(VECTOR, [0.0] * WIDTH)
        sums = {
            (i, j): cgutils.alloca_once_value(builder, _load(builder, c, (i * c_stride + j) * 4) if add else zero)
            for i in range(PRODUCT_ROWS)
            for j in columns
        }
        with cgutils.for_range(builder, builder.udiv(num_terms, ir.Constant(INT64, PRODUCT_TERMS))) as loop:
            terms = builder.mul(loop.index, ir.Constant(INT64, 4 * PRODUCT_TERMS))
            from_a, from_b = builder.add(a, terms), builder.add(b, builder.mul(terms, ir.Constant(INT64, b_stride)))
            for k in range(PRODUCT_TERMS):
                rows = {j: _load(builder, from_b, (k * b_stride + j) * 4) for j in columns}
                for i in range(PRODUCT_ROWS):
                    factor = _splat(builder, from_a, (i * a_stride + k) * 4)
                    for j in columns:
                        before = builder.load(sums[i, j], typ=VECTOR)
                        builder.store(_fma(builder, factor, rows[j], before), sums[i, j])
        for (i, j), place in sums.items():
            _store(builder, builder.load(place, typ=VECTOR), c, (i * c_stride + j) * 4)

    return _piece(4, emit)


def make_dots(num_rows: int, num_columns: int, num_terms: int, pairs: bool) -> Any:
    """piece(x, weights, out, stride): dots `num_rows` rows of x with `num_columns` rows of weights, all bf16 [.,
    num_terms], in float32.

    Row r's results go to out + r * `stride` floats. num_terms: a multiple of 32, num_columns: 1, 2 or 4. `pairs`: by
    the instructions of avx512bf16.
    """
    step = _pair_step if pairs else _widened_step

    def emit(builder: Any, x: Any, weights: Any, out: Any, stride: Any) -> None:
        zero = ir.Constant(VECTOR, [0.0] * WIDTH)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(num_columns)] for _ in range(num_rows)]
        with cgutils.for_range(builder, ir.Constant(INT64, num_terms // (2 * WIDTH))) as loop:
            first = builder.mul(loop.index, ir.Constant(INT64, 4 * WIDTH))
            step(builder, builder.add(x, first), builder.add(weights, first), 2 * num_terms, sums)
        for r, row in enumerate(sums):
            at = builder.add(out, builder.mul(stride, ir.Constant(INT64, 4 * r)))
            _store(builder, _lane_sums(builder, [builder.load(place, typ=VECTOR) for place in row]), at, 0)

    return _piece(4, emit)


def _pair_step(builder: Any, x: Any, weights: Any, row_bytes: int, sums: list[list[Any]]) -> None:
    """Adds 32 terms of every dot by the instruction that multiplies bf16 in pairs."""
    name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    add_products = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

    def load(address: Any, num_bytes: int) -> Any:
        return builder.load(_at(builder, address, num_bytes, PAIRS), align=2, typ=PAIRS)

    columns = [load(weights, c * row_bytes) for c in range(len(sums[0]))]
    for r, row in enumerate(sums):
        terms = load(x, r * row_bytes)
        for place, column in zip(row, columns, strict=True):
            builder.store(builder.call(add_products, [builder.load(place, typ=VECTOR), terms, column]), place)


def _widened_step(builder: Any, x: Any, weights: Any, row_bytes: int, sums: list[list[Any]]) -> None:
    """Adds 32 terms of every dot, widened to float32: those of even index first, for a shift and a mask part them."""
    whole = ir.VectorType(INT32, WIDTH)

    def load(address: Any, num_bytes: int) -> tuple[Any, Any]:
        words = builder.load(_at(builder, address, num_bytes, whole), align=2, typ=whole)
        even = builder.shl(words, ir.Constant(whole, [16] * WIDTH))
        odd = builder.and_(words, ir.Constant(whole, [-(1 << 16)] * WIDTH))
        return builder.bitcast(even, VECTOR), builder.bitcast(odd, VECTOR)

    columns = [load(weights, c * row_bytes) for c in range(len(sums[0]))]
    for r, row in enumerate(sums):
        terms = load(x, r * row_bytes)
        for place, column in zip(row, columns, strict=True):
            total = builder.load(place, typ=VECTOR)
            for term, weight in zip(terms, column, strict=True):
                total = _fma(builder, term, weight, total)
            builder.store(total, place)


def make_prefetch(num_bytes: int) -> Any:
    """piece(address, _): asks for `num_bytes` from there, one 64-byte line at a time; the hardware stops at every 4 KiB
    page.
    """

    def emit(builder: Any, address: Any, _unused: Any) -> None:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        prefetch = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0"
        )
        for offset in range(0, num_bytes, 64):
            builder.call(
                prefetch,
                [_at(builder, address, offset, ir.IntType(8)), *(ir.Constant(INT32, flag) for flag in (0, 3, 1))],
            )

    return _piece(2, emit)
