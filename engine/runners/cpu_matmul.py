"""Linears on CPUs as one compiled kernel for all shapes: bf16 weights in panels, float32 sums, bf16 out.

The weights of PANEL outputs lie together, pair of terms by pair of terms, as the kernel reads them: straight through,
with what comes next on its way into the cache meanwhile. An x of many rows is worked on in tiles, whose sums stay in
registers. Every sum is over the terms in their order, whatever the number of rows, so what comes out for a row does not
depend on the rows beside it.

Where torch's float32 matmul is faster at many rows, panels are widened for it a few at a time.
"""

import functools
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import torch
from numba import prange
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from engine.runners import cpu_simd
from engine.runners.cpu_simd import (
    Kind,
    has_feature,
    make_copy,
    make_round,
    make_tiles,
    make_widen_pairs,
    make_widen_row,
)
from jit.kernel_cache import compiled, variant

SOURCES = (__file__, cpu_simd.__file__)

TERMS = 32
"""The number of inputs is a multiple of this."""
PANEL = 32
"""Outputs of one panel."""
BLOCK_TERMS = 256
"""Terms that all rows go through before the next: so much of a panel (16 KiB) stays in the L1 cache."""
BLOCK_ROWS = 192
"""Rows that go through a panel together: so many of x, and their sums, stay in the L2 cache."""
HUGE_PAGE = 2 << 20
SHARES = 4
"""Each thread gets as many panels, or rows of x are worked on in groups: so shares are about equal."""
MOST_ROWS = 1024
"""Rows that are brought into place at a time."""
PLACED_ALONE = 256
"""One thread brings fewer rows into place than these: several would wait for each other once more."""
FEW_ROWS = 64
"""Rows of x are worked on in no smaller groups than of this size."""
PAIRS, WIDE = has_feature("avx512bf16"), has_feature("avx512f")
"""Whether one instruction multiplies and adds bf16 in pairs; whether there are registers for tiles of 12 rows by a
panel, not by half of one.
"""
KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""What kernels call the model's dtype."""
WIDENED_TERMS = 1 << 17
"""About as many weights are widened at a time: their 512 KiB stay in the L2 cache, and torch's call pays."""
MADE_FOR = " ".join(cpu_target.target_context.codegen().magic_tuple())
"""The CPU, and its instructions, that code is made for."""


class Matmul(Protocol):
    """out [rows, num_out] bf16 = x [rows, num_in] bf16 @ weights.T + bias. Each of the `num_bins` threads computes a
    share of the panels. All but the numbers are addresses.

    panels: of `pack`. bias: float32, one for each of the panels' columns. work: `scratch_bytes`.
    """

    def __call__(
        self, x: int, num_rows: int, num_in: int, panels: int, num_out: int, bias: int, out: int, work: int,
        num_bins: int,
    ) -> None: ...  # fmt: skip


def pack(weight: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """bf16 [out, in] -> panels [ceil(out / PANEL), in / 2, PANEL, 2], with rows of zeros after the last; in `memory`,
    uint8 [`panel_bytes`], if that is given.
    """
    num_out, num_in = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_out % PANEL))
    pairs = padded.contiguous().view(torch.int32).view(-1, PANEL, num_in // 2).transpose(1, 2)
    to = torch.empty(pairs.shape, dtype=torch.int32) if memory is None else memory.view(torch.int32).view(pairs.shape)
    return to.copy_(pairs).view(torch.bfloat16).view(*pairs.shape, 2)


def panel_bytes(num_out: int, num_in: int) -> int:
    return -(-num_out // PANEL) * PANEL * num_in * 2


def huge_pages(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros in pages of 2 MiB where the system gives them: a step reads every weight once, and
    looks for the address of each page that they lie in.
    """
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    with suppress(OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE
    return memory[first : first + num_bytes]


def huge_pieces(sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """`huge_pages` of these sizes, one after the other in one piece of memory."""
    pieces: Sequence[torch.Tensor] = huge_pages(sum(sizes)).split(list(sizes))
    return pieces


def scratch_bytes(num_rows: int, num_in: int, num_bins: int) -> int:
    """What a `Matmul` of so many rows needs."""
    placed = min(num_rows, MOST_ROWS) * -(-num_in // BLOCK_TERMS) * 4 * _pitch(pairs=False)
    return placed + num_bins * min(num_rows, BLOCK_ROWS) * 4 * PANEL


def _pitch(*, pairs: bool) -> int:
    """4-byte words of a row of one block of x; 64 bytes more, so that rows do not meet in one set of the cache."""
    return BLOCK_TERMS // (2 if pairs else 1) + 16


@functools.cache
def make_matmul(*, pairs: bool = PAIRS, wide: bool = WIDE) -> Matmul:
    KEY = f"{'pairs' if pairs else 'widened'}_{'wide' if wide else 'narrow'}"
    PITCH, PANEL_BYTES, BLOCK_PAIRS = 4 * _pitch(pairs=pairs), 4 * PANEL, BLOCK_TERMS // 2
    place_row, add_block = _make_place_row(pairs, KEY), _make_add_block(pairs, wide, KEY)
    begin, end = make_copy(PANEL_BYTES), make_round(PANEL)

    def matmul(
        x: int, num_rows: int, num_in: int, panels: int, num_out: int, bias: int, out: int, work: int, num_bins: int
    ) -> None:
        num_panels, num_pairs = (num_out + PANEL - 1) // PANEL, num_in // 2
        num_blocks = (num_in + BLOCK_TERMS - 1) // BLOCK_TERMS
        for start in range(0, num_rows, MOST_ROWS):
            placed = min(MOST_ROWS, num_rows - start)
            if placed < PLACED_ALONE:
                for r in range(placed):
                    place_row(x + (start + r) * num_in * 2, num_in, work + r * PITCH, placed)
            else:
                for r in prange(placed):
                    place_row(x + (start + r) * num_in * 2, num_in, work + r * PITCH, placed)
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
                        pair = block * BLOCK_PAIRS
                        terms, panel = block * placed + first, p * num_pairs + pair
                        n = min(BLOCK_PAIRS, num_pairs - pair)
                        add_block(rows, work + terms * PITCH, panels + panel * PANEL_BYTES, sums, n)
                    to = out + ((start + first) * num_out + p * PANEL) * 2
                    for r in range(rows):
                        end(sums + r * PANEL_BYTES, to + r * num_out * 2, min(PANEL, num_out - p * PANEL))

    return compiled(SOURCES, KEY)(matmul)


def _make_place_row(pairs: bool, key: str) -> Callable[[int, int, int, int], None]:
    PITCH, STEP_BYTES = 4 * _pitch(pairs=pairs), (2 if pairs else 4) * TERMS
    place = make_copy(2 * TERMS) if pairs else make_widen_row(TERMS, "bf16")

    def place_row(x: int, num_in: int, to: int, rows: int) -> None:
        """A row of x into its place in each of the blocks, which have `rows` rows."""
        for term in range(0, num_in, TERMS):
            block = term // BLOCK_TERMS
            place(x + term * 2, to + block * rows * PITCH + (term - block * BLOCK_TERMS) // TERMS * STEP_BYTES)

    return cast(Callable[[int, int, int, int], None], register_jitable(variant(place_row, key)))


def _make_add_block(pairs: bool, wide: bool, key: str) -> Callable[[int, int, int, int, int], None]:
    PITCH, PANEL_BYTES = 4 * _pitch(pairs=pairs), 4 * PANEL
    form: dict[str, Any] = {"pitch": _pitch(pairs=pairs), "width": PANEL, "pairs": pairs}
    FEW, TILE = (12, 12) if wide else (3, 6)
    whole = make_tiles(FEW, 2, **form)
    half = whole if wide else make_tiles(TILE, 1, **form)

    def add_block(rows: int, x: int, panel: int, sums: int, num_pairs: int) -> None:
        """Adds a block's products to the sums of a panel, in tiles of about equally many rows: of the whole panel where
        the sums of all rows fit into registers, else of one half after the other.
        """
        if wide or rows <= FEW:
            tiles = (rows + FEW - 1) // FEW
            for t in range(tiles):
                r = rows * t // tiles
                whole(rows * (t + 1) // tiles - r, x + r * PITCH, panel, sums + r * PANEL_BYTES, num_pairs)
        else:
            tiles = (rows + TILE - 1) // TILE
            for t in range(tiles):
                r = rows * t // tiles
                n, terms, to = rows * (t + 1) // tiles - r, x + r * PITCH, sums + r * PANEL_BYTES
                half(n, terms, panel, to, num_pairs)
                half(n, terms, panel + PANEL_BYTES // 2, to + PANEL_BYTES // 2, num_pairs)

    return cast(Callable[[int, int, int, int, int], None], register_jitable(variant(add_block, key)))


class WidenPanels(Protocol):
    """out [num_in, columns] float32 = the transposed weights of the panels from address `panels` on, by `num_bins`
    threads; `out` is an address.
    """

    def __call__(self, panels: int, num_in: int, num_panels: int, out: int, num_bins: int) -> None: ...


@functools.cache
def make_widen_panels() -> WidenPanels:
    widen_pairs, PANEL_BYTES = make_widen_pairs(PANEL), 4 * PANEL

    def widen_panels(panels: int, num_in: int, num_panels: int, out: int, num_bins: int) -> None:
        num_pairs, row_bytes = num_in // 2, num_panels * PANEL_BYTES
        for b in prange(num_bins):
            for p in range(num_panels * b // num_bins, num_panels * (b + 1) // num_bins):
                for k in range(num_pairs):
                    to = out + 2 * k * row_bytes + p * PANEL_BYTES
                    widen_pairs(panels + (p * num_pairs + k) * PANEL_BYTES, to, to + row_bytes)

    return compiled(SOURCES)(widen_panels)


def widened_product(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, widen_panels: WidenPanels, num_bins: int
) -> torch.Tensor:
    """x [T, in] times the weights in `panels`, plus `bias`, by torch in float32: [T, columns of all panels]. Few panels
    at a time are widened, so that torch finds them in the cache.
    """
    wide, num_panels, num_in = x.float(), len(panels), x.shape[1]
    out = bias.repeat(len(x), 1)
    step = max(1, WIDENED_TERMS // (num_in * PANEL))
    weights = torch.empty(num_in * step * PANEL)
    for first in range(0, num_panels, step):
        num = min(step, num_panels - first)
        here = weights[: num_in * num * PANEL].view(num_in, num * PANEL)
        widen_panels(panels[first].data_ptr(), num_in, num, here.data_ptr(), min(num, num_bins))
        out[:, first * PANEL : (first + num) * PANEL].addmm_(wide, here)
    return out


class _Scratch(threading.local):
    """Memory of one thread that only grows, so that a call of some microseconds allocates none."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size = self._address = 0

    def address(self, num_bytes: int) -> int:
        """Of so many bytes, which the next call of the thread gets too."""
        if num_bytes > self._size:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._size, self._address = num_bytes, self._memory.data_ptr()
        return self._address


scratch = _Scratch()


class PanelLinear:
    """[T, in] -> [T, out], both bf16. Holds the weights in panels alone, and may be called by several threads."""

    def __init__(
        self, panels: torch.Tensor, bias: torch.Tensor | None, num_out: int, num_threads: int, widened_from: int
    ) -> None:
        """From `widened_from` rows on torch multiplies, in float32."""
        self._panels, self._num_out, self._num_bins, self._widened_from = panels, num_out, num_threads, widened_from
        self._num_panels, num_pairs, _, _ = panels.shape
        self._num_in = 2 * num_pairs
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[:num_out] = bias
        self._addresses = panels.data_ptr(), self._bias.data_ptr()
        self._matmul, self._widen_panels = make_matmul(), make_widen_panels()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows >= self._widened_from:
            return self._widened(x)
        out = torch.empty(num_rows, self._num_out, dtype=torch.bfloat16)
        x, num_in, (panels, bias) = x.contiguous(), self._num_in, self._addresses
        work = scratch.address(scratch_bytes(num_rows, num_in, self._num_bins))
        self._matmul(x.data_ptr(), num_rows, num_in, panels, self._num_out, bias, out.data_ptr(), work, self._num_bins)
        return out

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        out = widened_product(x, self._panels, self._bias, self._widen_panels, self._num_bins)
        return out[:, : self._num_out].bfloat16()
