"""Steps of decodes alone at a few sizes, padded up to the next one and replayed as a CUDA graph: hundreds of launches
become one.

Graphs read what does not move: one small buffer per size, and block tables of full width that all sizes share. A step
is packed for its size on the host and copied there. On CPU tensors nothing is captured; the padded step is then
computed as any other.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.runners.cuda_ops import DeviceStep
from engine.runners.step_plan import StepPlan
from protocol.arrays import Int32

TOKEN_IDS, POSITIONS, SLOTS, CONTEXTS, STARTS = range(5)

Forward = Callable[[DeviceStep], torch.Tensor | None]


def packed_decodes(plan: StepPlan | None, size: int) -> Int32:
    """A step of one token per sequence, and padding up to `size` of them: int32 [5, size + 1 and a little], by the
    indices above.

    A padding row computes token 0 at position 0, caches nothing and attends to nothing. None: nothing but padding.
    """
    packed = np.zeros((5, (size + 4) // 4 * 4), np.int32)  # whole 16 bytes a row
    packed[SLOTS] = -1
    packed[STARTS, : size + 1] = np.arange(size + 1)
    if plan is not None:
        num = len(plan.contexts)
        packed[:4, :num] = plan.token_ids, plan.positions, plan.slots, plan.contexts
    return packed


class DecodeGraphs:
    """`max_blocks`: of one sequence. `num_splits`: by size; a graph has it built in, so it is that of the longest
    contexts.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: tuple[int, ...],
        *,
        max_blocks: int,
        num_splits: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self._forward, self._device = forward, device
        self._tables = torch.zeros(max(sizes, default=0), max_blocks, dtype=torch.int32, device=device)
        self._steps: dict[int, tuple[torch.Tensor, DeviceStep]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        for size in sizes:
            packed = torch.from_numpy(packed_decodes(None, size)).to(device)
            self._steps[size] = packed, self._step_of(packed, size, num_splits(size))
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

    def _step_of(self, packed: torch.Tensor, size: int, num_splits: int) -> DeviceStep:
        return DeviceStep(
            token_ids=packed[TOKEN_IDS, :size],
            positions=packed[POSITIONS, :size],
            slots=packed[SLOTS, :size],
            starts=packed[STARTS, : size + 1],
            contexts=packed[CONTEXTS, :size],
            block_tables=self._tables[:size],
            kept=None,
            max_num_queries=1,
            num_splits=num_splits,
        )
