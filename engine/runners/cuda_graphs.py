"""Steps of decodes alone at a few sizes, padded up to the next one and replayed as a CUDA graph: hundreds of launches
become one.

Graphs read what does not move: one small buffer per size, and block tables of full width that all sizes share. A step
is packed for its size on the host and copied there, attention's work lists with it: a graph has their room and their
grid, which are those of its size, and each replay their contents. On CPU tensors nothing is captured; the padded step
is then computed as any other.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from engine.kernels.attention_work import Grid, Work, idle, list_size
from engine.kernels.paged_attention import Launch
from engine.runners.cuda_ops import DeviceStep
from engine.runners.step_plan import StepPlan
from protocol.arrays import Int32

TOKEN_IDS, POSITIONS, SLOTS, CONTEXTS, STARTS = range(5)

Forward = Callable[[DeviceStep], torch.Tensor | None]
Array = TypeVar("Array", Int32, torch.Tensor)


def _row_width(size: int) -> int:
    return (size + 4) // 4 * 4  # whole 16 bytes a row


def _list_room(grid: Grid, size: int) -> int:
    """Elements of one work list for at most `size` decodes."""
    return list_size(grid, size + grid.num_programs - 1)


def step_rows(packed: Array, size: int) -> Array:
    """The part of a packed step that has a row for each index above: [5, size + 1 and a little]."""
    return packed[: 5 * _row_width(size)].reshape(5, -1)


def packed_decodes(plan: StepPlan | None, size: int, works: Sequence[Sequence[Work]]) -> Int32:
    """A step of one token per sequence, and padding up to `size` of them: int32, `step_rows` and then the room of one
    work list for each window. `works` [windows, 1]: attention's launches; idle ones where there is no plan.

    A padding row computes token 0 at position 0, caches nothing and attends to nothing. None: nothing but padding.
    """
    room = _list_room(works[0][0].grid, size)
    packed = np.zeros(5 * _row_width(size) + len(works) * room, np.int32)
    rows, lists = step_rows(packed, size), packed[5 * _row_width(size) :].reshape(-1, room)
    rows[SLOTS] = -1
    rows[STARTS, : size + 1] = np.arange(size + 1)
    if plan is not None:
        rows[:4, : len(plan.contexts)] = plan.token_ids, plan.positions, plan.slots, plan.contexts
    for row, (work,) in zip(lists, works, strict=True):
        row[: len(work.array)] = work.array
    return packed


class DecodeGraphs:
    """`max_blocks`: of one sequence. `windows`: of the model's layers; `grid`: attention's, of decodes."""

    def __init__(
        self,
        forward: Forward,
        sizes: tuple[int, ...],
        *,
        max_blocks: int,
        windows: Sequence[int],
        grid: Grid,
        device: torch.device,
    ) -> None:
        self._forward, self._windows, self._grid, self._device = forward, windows, grid, device
        self._tables = torch.zeros(max(sizes, default=0), max_blocks, dtype=torch.int32, device=device)
        self._steps: dict[int, tuple[torch.Tensor, DeviceStep]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        for size in sizes:
            packed = torch.from_numpy(packed_decodes(None, size, [[idle(grid)]] * len(windows))).to(device)
            self._steps[size] = packed, self._step_of(packed, size)
        if device.type == "cuda":
            self._capture()

    def size_for(self, num_decodes: int) -> int | None:
        """The size to pad to; None: there is none as large."""
        return next((size for size in self._steps if size >= num_decodes), None)

    def run(self, size: int, packed: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
        """What goes into the head: [size, hidden], valid until the next run. `packed`: as by `packed_decodes`;
        `block_tables`: [B, W].
        """
        static, step = self._steps[size]
        static.copy_(packed)
        self._tables[: len(block_tables), : block_tables.shape[1]].copy_(block_tables)
        if size in self._graphs:
            graph, x = self._graphs[size]
            graph.replay()
            return x
        return self._computed(step)

    def _capture(self) -> None:
        """Largest first: the smaller ones then fit into the memory of the larger."""
        pool = torch.cuda.graph_pool_handle()
        for size, (_, step) in reversed(self._steps.items()):
            self._computed(step)  # compiles its kernels, which a capture could not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                x = self._computed(step)
            self._graphs[size] = graph, x
        torch.cuda.synchronize(self._device)

    def _computed(self, step: DeviceStep) -> torch.Tensor:
        x = self._forward(step)
        assert x is not None, "every row goes on"
        return x

    def _step_of(self, packed: torch.Tensor, size: int) -> DeviceStep:
        rows, most = step_rows(packed, size), self._grid.num_programs - 1
        lists = packed[rows.numel() :].view(len(self._windows), -1)
        return DeviceStep(
            token_ids=rows[TOKEN_IDS, :size],
            positions=rows[POSITIONS, :size],
            slots=rows[SLOTS, :size],
            starts=rows[STARTS, : size + 1],
            contexts=rows[CONTEXTS, :size],
            block_tables=self._tables[:size],
            kept=None,
            launches={
                window: [Launch(self._grid, work, min(most, size))]
                for window, work in zip(self._windows, lists, strict=True)
            },
        )
