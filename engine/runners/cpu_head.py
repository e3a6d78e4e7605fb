"""The model's head as a compiled kernel: bf16 or float16 in, float32 out, which torch's own linears on CPUs do not
offer. One per hidden size.

On a CPU with instructions for bf16 it is as fast as oneDNN's packed linear, and needs no packed copy of the largest
matrix of a small model; on one without them several times as fast as torch's.
"""

import functools
from typing import Protocol

from numba import prange

from engine.runners import cpu_simd
from engine.runners.cpu_elements import Stored
from engine.runners.cpu_simd import Kind, has_feature, make_dots, make_widen_parts
from jit.kernel_cache import compiled
from protocol.arrays import Float32

SOURCES = (__file__, cpu_simd.__file__)

TERMS = 32
"""A hidden size is a multiple of this."""
ROWS, COLUMNS = 4, 4
"""Of x and of the weights in one tile, whose sums stay in registers of 16 lanes; of 8 lanes there are half as many, for
tiles of half as many columns."""
PAIRS, WIDE = has_feature("avx512bf16"), has_feature("avx512f")
"""Whether one instruction multiplies and adds bf16 in pairs; whether registers have 16 lanes, and are 32."""
RUN = 64
"""Rows of weights that stay in the cache while all of x passes."""


class Head(Protocol):
    """out [L, vocab] float32 = x [L, hidden] @ weights [vocab, hidden].T, both bf16 or float16. Each of the `num_bins`
    threads computes a share of the columns. wide_x [L, hidden]: scratch.
    """

    def __call__(self, x: Stored, weights: Stored, wide_x: Float32, out: Float32, num_bins: int) -> None: ...


@functools.cache
def make_head(hidden: int, kind: Kind = "bf16", *, pairs: bool = PAIRS, wide: bool = WIDE) -> Head:
    """`pairs` counts for bf16 alone. Without it x is widened once, before the weights are."""
    ACROSS, lanes, pairs = COLUMNS if wide else COLUMNS // 2, 16 if wide else 8, pairs and kind == "bf16"
    tile, line, dot = (
        make_dots(rows, columns, hidden, pairs, kind, lanes) for rows, columns in ((ROWS, ACROSS), (1, COLUMNS), (1, 1))
    )
    widen_parts = make_widen_parts(hidden, kind, lanes)
    BYTES, X_BYTES = 2 * hidden, (2 if pairs else 4) * hidden

    def head(x: Stored, weights: Stored, wide_x: Float32, out: Float32, num_bins: int) -> None:
        num_rows, vocab_size = out.shape
        in_tiles = num_rows - num_rows % ROWS
        from_x, from_weights, to = x.ctypes.data, weights.ctypes.data, out.ctypes.data
        if not pairs:
            for r in range(num_rows):
                widen_parts(from_x + r * BYTES, wide_x.ctypes.data + r * X_BYTES)
            from_x = wide_x.ctypes.data
        share = (vocab_size // RUN + num_bins) // num_bins * RUN
        for b in prange(num_bins):
            for first in range(b * share, min(vocab_size, (b + 1) * share), RUN):
                last = min(first + RUN, vocab_size)
                whole = last - (last - first) % COLUMNS
                for r in range(0, in_tiles, ROWS):
                    for c in range(first, whole, ACROSS):
                        tile(from_x + r * X_BYTES, from_weights + c * BYTES, to + (r * vocab_size + c) * 4, vocab_size)
                for r in range(in_tiles, num_rows):
                    for c in range(first, whole, COLUMNS):
                        line(from_x + r * X_BYTES, from_weights + c * BYTES, to + (r * vocab_size + c) * 4, vocab_size)
                for r in range(num_rows):
                    for c in range(whole, last):
                        dot(from_x + r * X_BYTES, from_weights + c * BYTES, to + (r * vocab_size + c) * 4, vocab_size)

    return compiled(SOURCES, f"{hidden}_{'pairs' if pairs else kind}_{ACROSS}")(head)
