"""Straight-line SIMD pieces for the CPU kernels, emitted as LLVM vector code and called from numba functions like any
other function.

Every argument is an address (int64, bytes). float32 everywhere, but for keys and values in the cache: those are of the
cache's element type, a `Kind`, and are widened as they are loaded. Vectors are 16 wide and LLVM splits them where the
CPU's are narrower, but for those of decodes, which are as wide as the CPU's.

The file is longer than 300 lines because it is the one place in which vector code is emitted.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

Kind = Literal["bf16", "f16", "f32"]
"""Elements of the model's dtype."""


def element_bytes(kind: Kind) -> int:
    return 4 if kind == "f32" else 2


WIDTH = 16
AHEAD = 8192
"""Bytes between the weights in use and those that are prefetched."""

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, HALVES = ir.VectorType(FLOAT, WIDTH), ir.VectorType(ir.HalfType(), WIDTH)
WORDS = ir.VectorType(INT32, WIDTH)
"""One float32, or two bf16 whose first is the low half, in each."""
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


def _load_wide(builder: Any, address: Any, first: int, kind: Kind) -> Any:
    """16 cache elements from element `first` on, as float32."""
    if kind == "f32":
        return _load(builder, address, first * 4)
    if kind == "f16":
        return _load_halves(builder, address, first * 2)
    half = ir.VectorType(ir.IntType(16), WIDTH)
    words = builder.load(_at(builder, address, first * 2, half), align=2, typ=half)
    whole = ir.VectorType(INT32, WIDTH)
    return builder.bitcast(builder.shl(builder.zext(words, whole), ir.Constant(whole, [16] * WIDTH)), VECTOR)


def _load_halves(builder: Any, address: Any, num_bytes: int) -> Any:
    """16 elements of float16 as float32."""
    return builder.fpext(builder.load(_at(builder, address, num_bytes, HALVES), align=2, typ=HALVES), VECTOR)


def _splat(builder: Any, address: Any, num_bytes: int, lanes: int = WIDTH) -> Any:
    return _spread(builder, _load(builder, address, num_bytes, FLOAT), lanes)


def _spread(builder: Any, value: Any, lanes: int = WIDTH) -> Any:
    nothing = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    return _pick(builder, one, one, [0] * lanes)


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
    """Sum over the lanes of each of n equally wide vectors (n a power of two, at most their width), as one vector of n
    floats: neighbours are added pairwise, first within every four lanes, then fours.
    """
    num, width = len(vectors), vectors[0].type.count
    for run in (1, 1, *[4] * ((width // 4).bit_length() - 1)):
        both = [lane for lane in range(2 * width) if not lane & run]
        if run == 1:  # stay within four lanes: that is one cheap instruction
            both = [lane for four in range(0, width, 4) for lane in (four, four + 2, width + four, width + four + 2)]
        if len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        else:
            pairs = [(vectors[0], vectors[0])]
            if run == 4:
                both = both[: len(both) // 2]
        vectors = [
            builder.fadd(_pick(builder, a, b, both), _pick(builder, a, b, [lane + run for lane in both]))
            for a, b in pairs
        ]
        width = len(both)
    total = vectors[0]
    return total if width == num else _pick(builder, total, total, list(range(num)))


def has_feature(name: str) -> bool:
    """Whether code is made for CPUs with this one, as LLVM calls it."""
    return f"+{name}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


WIDE = has_feature("avx512f")
"""Whether registers have 16 lanes; else they have 8."""
REGISTERS = 32 if WIDE else 16
RUN_BYTES = 256
"""Of a block's keys that a decode reads before it turns to another block's."""
NUM_SUMS = 20 if WIDE else 8
"""Registers for the sums of a decode's dots; the others hold queries and keys."""
PRODUCT_ROWS, PRODUCT_COLUMNS = (8, 32) if WIDE else (6, 16)
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

    if num_arguments == 3:

        @intrinsic
        def three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
            return signature, generate

        return three

    if num_arguments == 4:

        @intrinsic
        def four(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            return signature, generate

        return four

    @intrinsic
    def five(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return signature, generate

    return five


def _lanes(head_dim: int) -> int:
    """Lanes of a vector of a decode: a whole register, of which two hold a part of a head."""
    return 16 if WIDE and head_dim % 32 == 0 else 8


def _load_part(builder: Any, address: Any, first: int, lanes: int, kind: Kind, again: Any = None) -> tuple[Any, Any]:
    """2 * lanes cache elements from element `first` on, as float32. Of bf16 those of even index, then those of odd
    index: a shift and a mask part them, where widening neighbours would take two instructions more.

    again: the same address under another name (`_renamed`), from which the second of the two is loaded when it is
    needed, so that both together take one register.
    """
    vector, words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
    if kind == "f32":
        return _load(builder, address, first * 4, vector), _load(builder, address, (first + lanes) * 4, vector)
    if kind == "f16":
        halves = ir.VectorType(ir.HalfType(), lanes)
        low, high = (
            builder.load(_at(builder, address, at * 2, halves), align=2, typ=halves) for at in (first, first + lanes)
        )
        return builder.fpext(low, vector), builder.fpext(high, vector)
    pairs = builder.load(_at(builder, address, first * 2, words), align=2, typ=words)
    even = builder.shl(pairs, ir.Constant(words, [16] * lanes))
    if again is not None:
        pairs = builder.load(_at(builder, again, first * 2, words), align=2, typ=words)
    odd = builder.and_(pairs, ir.Constant(words, [-(1 << 16)] * lanes))
    return builder.bitcast(even, vector), builder.bitcast(odd, vector)


def _renamed(builder: Any, address: Any) -> Any:
    """The same address, but LLVM does not know that and loads again what it would else keep in a register."""
    return builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [address], False)


def make_part_rows(head_dim: int, num_rows: int, kind: Kind, *, join: bool) -> Any:
    """piece(rows, out): float32 rows [num_rows, head_dim] in the order in which a decode loads cache elements, or with
    `join` back from it.
    """
    lanes = _lanes(head_dim)
    orders = [list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2))]
    if join:
        zipped = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for lane in pair]
        orders = [zipped[:lanes], zipped[lanes:]]
    if kind != "bf16":
        orders = [list(range(lanes)), list(range(lanes, 2 * lanes))]

    def emit(builder: Any, rows: Any, out: Any) -> None:
        for first in range(0, num_rows * head_dim, 2 * lanes):
            low, high = _load_part(builder, rows, first, lanes, "f32")
            for i, order in enumerate(orders):
                _store(builder, _pick(builder, low, high, order), out, (first + i * lanes) * 4)

    return _piece(2, emit)


def make_dot_keys(head_dim: int, group: int, kind: Kind) -> tuple[Any, int, int]:
    """(piece, n, lanes): piece(q, keys, parts) multiplies `group` rows of q [group, head_dim], in the order of
    `make_part_rows`, with n rows of cached keys [n, head_dim]. What is left of each dot are its sums by lane,
    parts [group, lanes, lanes], whose second index is the key's.

    n divides `lanes`: as many keys as are RUN_BYTES, or two, if their sums stay in registers.
    """
    num, lanes = 2, _lanes(head_dim)
    while 2 * num <= lanes and 2 * num * head_dim * element_bytes(kind) <= RUN_BYTES:
        num *= 2
    while num > 1 and num * group > NUM_SUMS:
        num //= 2
    vector = ir.VectorType(FLOAT, lanes)

    def emit(builder: Any, q: Any, keys: Any, parts: Any) -> None:
        sums: list[list[Any]] = [[None] * num for _ in range(group)]
        for d in range(0, head_dim, 2 * lanes):
            rows = [
                [_load(builder, q, (g * head_dim + d + i * lanes) * 4, vector) for i in (0, 1)] for g in range(group)
            ]
            for j in range(num):
                for i, key in enumerate(_load_part(builder, keys, j * head_dim + d, lanes, kind)):
                    for g in range(group):
                        before, row = sums[g][j], rows[g][i]
                        sums[g][j] = builder.fmul(row, key) if before is None else _fma(builder, row, key, before)
        for g, j in product(range(group), range(num)):
            _store(builder, sums[g][j], parts, (g * lanes + j) * lanes * 4)

    return _piece(3, emit), num, lanes


def make_join_dots(head_dim: int, group: int, score_stride: int) -> Any:
    """piece(parts, scores): the dots of `make_dot_keys` for as many keys as there are lanes. Head g's go to scores +
    g * score_stride floats.
    """
    lanes = _lanes(head_dim)
    vector = ir.VectorType(FLOAT, lanes)

    def emit(builder: Any, parts: Any, scores: Any) -> None:
        for g in range(group):
            sums = [_load(builder, parts, (g * lanes + j) * lanes * 4, vector) for j in range(lanes)]
            _store(builder, _lane_sums(builder, sums), scores, g * score_stride * 4)

    return _piece(2, emit)


def make_weigh_values(head_dim: int, group: int, score_stride: int, kind: Kind) -> Any:
    """piece(weights, rows, offset, acc, num): acc [group, head_dim], in the order of `make_part_rows`, += weights @
    values, for `num` rows of cached values, each `offset` bytes behind an address of rows [num] (int64).

    Head g's `num` weights stand at weights + g * score_stride floats.
    """
    lanes, row_bytes = _lanes(head_dim), head_dim * element_bytes(kind)
    heads = min(group, REGISTERS // 3)  # each has a weight and a pair of sums; one register is the value's
    across = max(1, ((REGISTERS - 1) // heads - 1) // 2) * 2 * lanes
    vector = ir.VectorType(FLOAT, lanes)

    def emit(builder: Any, weights: Any, rows: Any, offset: Any, acc: Any, num: Any) -> None:
        for g0, d0 in product(range(0, group, heads), range(0, head_dim, across)):
            some, columns = range(g0, min(group, g0 + heads)), range(d0, min(head_dim, d0 + across), lanes)
            sums = {
                (g, d): cgutils.alloca_once_value(builder, _load(builder, acc, (g * head_dim + d) * 4, vector))
                for g in some
                for d in columns
            }
            with cgutils.for_range(builder, num) as loop:
                at = builder.mul(loop.index, ir.Constant(INT64, 8))
                value_row = builder.add(_load(builder, builder.add(rows, at), 0, INT64), offset)
                from_weights = builder.add(weights, builder.mul(loop.index, ir.Constant(INT64, 4)))
                factors = {g: _splat(builder, from_weights, g * score_stride * 4, lanes) for g in some}
                if g0 == d0 == 0:
                    for rest in range(-(-across * element_bytes(kind) // 64) * 64, row_bytes, 64):
                        _prefetch(builder, value_row, rest)
                again = _renamed(builder, value_row)
                for d in columns[::2]:
                    for i, value in enumerate(_load_part(builder, value_row, d, lanes, kind, again)):
                        for g in some:
                            place = sums[g, d + i * lanes]
                            builder.store(_fma(builder, factors[g], value, builder.load(place, typ=vector)), place)
            for (g, d), place in sums.items():
                _store(builder, builder.load(place, typ=vector), acc, (g * head_dim + d) * 4)

    return _piece(5, emit)


def make_transpose_keys(head_dim: int, stride: int, kind: Kind) -> Any:
    """piece(keys, out): 16 rows of cached keys [16, head_dim] become out [head_dim, 16], rows `stride` floats apart."""

    def emit(builder: Any, keys: Any, out: Any) -> None:
        for d in range(0, head_dim, WIDTH):
            rows = [_load_wide(builder, keys, j * head_dim + d, kind) for j in range(WIDTH)]
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


def make_widen_row(head_dim: int, kind: Kind) -> Any:
    """piece(row, out): head_dim cache elements as float32."""

    def emit(builder: Any, row: Any, out: Any) -> None:
        for d in range(0, head_dim, WIDTH):
            _store(builder, _load_wide(builder, row, d, kind), out, d * 4)

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


def make_dots(num_rows: int, num_columns: int, num_terms: int, pairs: bool, kind: Kind, lanes: int) -> Any:
    """piece(x, weights, out, stride): dots `num_rows` rows of x with `num_columns` rows of weights [., num_terms], bf16
    or float16, in float32.

    Row r's results go to out + r * `stride` floats. num_terms: a multiple of 32, num_columns: 1, 2 or 4. `pairs`: x is
    bf16 too, and both go to the instructions of avx512bf16; else x is float32, as `make_widen_parts` makes it for as
    many `lanes`.
    """

    def emit(builder: Any, x: Any, weights: Any, out: Any, stride: Any) -> None:
        zero = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(num_columns)] for _ in range(num_rows)]
        with cgutils.for_range(builder, ir.Constant(INT64, num_terms // (2 * lanes))) as loop:
            first = builder.mul(loop.index, ir.Constant(INT64, 4 * lanes))
            here = builder.add(weights, first)
            for c in range(num_columns):
                _prefetch(builder, here, 2 * num_terms * c + AHEAD)
            if pairs:
                _pair_step(builder, builder.add(x, first), here, 2 * num_terms, sums)
            else:
                terms = builder.add(x, builder.mul(first, ir.Constant(INT64, 2)))
                _part_step(builder, terms, here, num_terms, kind, lanes, sums)
        for r, row in enumerate(sums):
            at = builder.add(out, builder.mul(stride, ir.Constant(INT64, 4 * r)))
            _store(builder, _lane_sums(builder, [builder.load(place, typ=zero.type) for place in row]), at, 0)

    return _piece(4, emit)


def make_widen_parts(num_terms: int, kind: Kind, lanes: int) -> Any:
    """piece(row, out): a bf16 or float16 row [num_terms] as float32, in the order in which `make_dots` loads its
    weights.
    """

    def emit(builder: Any, row: Any, out: Any) -> None:
        with cgutils.for_range(builder, ir.Constant(INT64, num_terms // (2 * lanes))) as loop:
            first = builder.mul(loop.index, ir.Constant(INT64, 4 * lanes))
            to = builder.add(out, builder.mul(first, ir.Constant(INT64, 2)))
            for i, part in enumerate(_load_part(builder, builder.add(row, first), 0, lanes, kind)):
                _store(builder, part, to, 4 * lanes * i)

    return _piece(2, emit)


def _pair_step(builder: Any, x: Any, weights: Any, row_bytes: int, sums: list[list[Any]]) -> None:
    """Adds 32 terms of every dot by the instruction that multiplies bf16 in pairs."""
    add_products = _pair_products(builder)

    def load(address: Any, num_bytes: int) -> Any:
        return builder.load(_at(builder, address, num_bytes, PAIRS), align=2, typ=PAIRS)

    columns = [load(weights, c * row_bytes) for c in range(len(sums[0]))]
    for r, row in enumerate(sums):
        terms = load(x, r * row_bytes)
        for place, column in zip(row, columns, strict=True):
            builder.store(builder.call(add_products, [builder.load(place, typ=VECTOR), terms, column]), place)


def _part_step(
    builder: Any, x: Any, weights: Any, num_terms: int, kind: Kind, lanes: int, sums: list[list[Any]]
) -> None:
    """Adds 2 * lanes terms of every dot."""
    vector = ir.VectorType(FLOAT, lanes)
    columns = [_load_part(builder, weights, c * num_terms, lanes, kind) for c in range(len(sums[0]))]
    for i in (0, 1):
        for r, row in enumerate(sums):
            terms = _load(builder, x, 4 * (r * num_terms + i * lanes), vector)
            for place, column in zip(row, columns, strict=True):
                builder.store(_fma(builder, terms, column[i], builder.load(place, typ=vector)), place)


def make_tiles(most_rows: int, num_vectors: int, *, pitch: int, width: int, pairs: bool) -> Any:
    """piece(rows, x, panel, sums, n), for 1 to `most_rows` rows: sums [rows, 16 num_vectors] += the products of n pairs
    of terms, in float32 and in the terms' order.

    x: rows `pitch` 4-byte words apart; a word is two bf16 if `pairs`, for the instruction that multiplies these, else
    one float32. panel: bf16 [n, width, 2], from its first used column on. Rows of sums are `width` floats apart.
    """
    add = _add_pairs if pairs else _add_terms

    def emit_rows(builder: Any, rows: int, x: Any, panel: Any, sums: Any, n: Any) -> None:
        offsets = [[(r * width + v * WIDTH) * 4 for v in range(num_vectors)] for r in range(rows)]
        places = [[cgutils.alloca_once_value(builder, _load(builder, sums, at)) for at in row] for row in offsets]
        with cgutils.for_range(builder, n) as loop:
            terms = builder.add(x, builder.mul(loop.index, ir.Constant(INT64, 4 if pairs else 8)))
            weights = builder.add(panel, builder.mul(loop.index, ir.Constant(INT64, 4 * width)))
            words = [_load(builder, weights, 4 * WIDTH * v, WORDS) for v in range(num_vectors)]
            for v in range(num_vectors):
                _prefetch(builder, weights, AHEAD + 4 * WIDTH * v)
            add(builder, terms, words, 4 * pitch, places)
        for row, row_offsets in zip(places, offsets, strict=True):
            for place, at in zip(row, row_offsets, strict=True):
                _store(builder, builder.load(place, typ=VECTOR), sums, at)

    def emit(builder: Any, rows: Any, x: Any, panel: Any, sums: Any, n: Any) -> None:
        done = builder.append_basic_block("tiles.done")
        choice = builder.switch(rows, done)
        for num in range(1, most_rows + 1):
            block = builder.append_basic_block(f"tiles.{num}")
            choice.add_case(ir.Constant(INT64, num), block)
            builder.position_at_end(block)
            emit_rows(builder, num, x, panel, sums, n)
            builder.branch(done)
        builder.position_at_end(done)

    return _piece(5, emit)


def _add_terms(builder: Any, x: Any, words: list[Any], pitch: int, places: list[list[Any]]) -> None:
    """Two terms of each row of x, `pitch` bytes apart, by two rows of weights."""
    for odd in (False, True):
        weights = [_widened(builder, word, odd) for word in words]
        for r, row in enumerate(places):
            term = _splat(builder, x, r * pitch + 4 * odd)
            for place, weight in zip(row, weights, strict=True):
                builder.store(_fma(builder, term, weight, builder.load(place, typ=VECTOR)), place)


def _add_pairs(builder: Any, x: Any, words: list[Any], pitch: int, places: list[list[Any]]) -> None:
    """As `_add_terms`, by the instruction that multiplies bf16 in pairs."""
    add_products, weights = _pair_products(builder), [builder.bitcast(word, PAIRS) for word in words]
    for r, row in enumerate(places):
        terms = builder.bitcast(_splat(builder, x, r * pitch), PAIRS)
        for place, weight in zip(row, weights, strict=True):
            builder.store(builder.call(add_products, [builder.load(place, typ=VECTOR), terms, weight]), place)


def _pair_products(builder: Any) -> Any:
    """The instruction that adds products of bf16 in pairs to float32 sums."""
    name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _widened(builder: Any, words: Any, odd: bool) -> Any:
    """The first or the second bf16 of each word, as float32."""
    if odd:
        return builder.bitcast(builder.and_(words, ir.Constant(WORDS, [-(1 << 16)] * WIDTH)), VECTOR)
    return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * WIDTH)), VECTOR)


def make_widen_pairs(num: int) -> Any:
    """piece(pairs, first, second): of `num` pairs of bf16 (a multiple of 16) those before, as float32, and those
    behind.
    """

    def emit(builder: Any, pairs: Any, first: Any, second: Any) -> None:
        for at in range(0, 4 * num, 4 * WIDTH):
            words = _load(builder, pairs, at, WORDS)
            _store(builder, _widened(builder, words, odd=False), first, at)
            _store(builder, _widened(builder, words, odd=True), second, at)

    return _piece(3, emit)


def make_copy(num_bytes: int) -> Any:
    """piece(source, to): copies `num_bytes`, a multiple of 64."""

    def emit(builder: Any, source: Any, to: Any) -> None:
        for at in range(0, num_bytes, 4 * WIDTH):
            _store(builder, _load(builder, source, at), to, at)

    return _piece(2, emit)


def make_round(num: int) -> Any:
    """piece(row, out, n): the first n of `num` float32 (a multiple of 16), rounded to bf16, to the nearest even."""

    def rounded(builder: Any, value: Any, lanes: int) -> Any:
        words, halves = (
            ir.IntType(bits) if lanes == 1 else ir.VectorType(ir.IntType(bits), lanes) for bits in (32, 16)
        )

        def constant(number: int) -> Any:
            return ir.Constant(words, number if lanes == 1 else [number] * lanes)

        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        up = builder.add(builder.add(bits, constant(0x7FFF)), odd)
        return builder.trunc(builder.lshr(up, constant(16)), halves)

    def store(builder: Any, value: Any, out: Any, num_bytes: int) -> None:
        builder.store(value, _at(builder, out, num_bytes, value.type), align=2)

    def emit(builder: Any, row: Any, out: Any, n: Any) -> None:
        with builder.if_else(builder.icmp_signed("==", n, ir.Constant(INT64, num))) as (all_of_them, some):
            with all_of_them:
                for c in range(0, num, WIDTH):
                    store(builder, rounded(builder, _load(builder, row, 4 * c), WIDTH), out, 2 * c)
            with some, cgutils.for_range(builder, n) as loop:
                one = _load(builder, builder.add(row, builder.mul(loop.index, ir.Constant(INT64, 4))), 0, FLOAT)
                to = builder.add(out, builder.mul(loop.index, ir.Constant(INT64, 2)))
                store(builder, rounded(builder, one, 1), to, 0)

    return _piece(3, emit)


def make_prefetch(num_bytes: int) -> Any:
    """piece(address, _): asks for `num_bytes` from there, one 64-byte line at a time; the hardware stops at every 4 KiB
    page.
    """

    def emit(builder: Any, address: Any, _unused: Any) -> None:
        for offset in range(0, num_bytes, 64):
            _prefetch(builder, address, offset)

    return _piece(2, emit)


def _prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Asks for the line, to be read, into every cache."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT32, INT32, INT32])
    name = "llvm.prefetch.p0"
    prefetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    flags = (ir.Constant(INT32, flag) for flag in (0, 3, 1))
    builder.call(prefetch, [_at(builder, address, num_bytes, ir.IntType(8)), *flags])
