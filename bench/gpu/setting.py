"""The setting in which the sections run: on a GPU at full size, or as a rehearsal with the smallest shapes, on CPU
tensors with interpreted kernels.

A process of the check sees one GPU, as an engine does. Which one it says in `CUDA_VISIBLE_DEVICES`, before its first
call of CUDA.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kv_transfer.transports.registry import TRANSPORTS

T = TypeVar("T")
SHARED_MEMORY = "gpu-check-"
"""Begins the name of every shared-memory segment that a section makes."""
ROOT = Path(__file__).parents[2]
"""Root of the source tree."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
FAKE_GPUS = ("fake:0", "fake:1")
"""The GPUs of a rehearsal. Their names are their bus ids."""

GPU_TRANSPORTS = tuple(transport.KIND for transport in TRANSPORTS if transport.MEMORY == ("GPU",))
"""Transports between two GPUs of one machine. One that reads host memory too is for links between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    rehearsal: bool
    seed: int
    model_dir: Path | None = None
    """Directory of SmolLM2-135M-Instruct, whose golden tokens are known. None: only random models are run."""
    gpus: tuple[str, ...] = FAKE_GPUS
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this run was shown."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda:0")

    def see_only(self, gpu: int) -> None:
        """Shows this process, and those that it starts, one GPU. None of them has called CUDA yet. Where there is but
        one, nothing is changed: it may be a slice of a GPU, which has a name of its own.
        """
        if len(self.gpus) > 1:
            os.environ[VISIBLE] = self.gpus[gpu]

    def size(self, real: T, rehearsed: T) -> T:
        """`real` on a GPU, `rehearsed` in a rehearsal."""
        return rehearsed if self.rehearsal else real

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes to try. A rehearsal leaves bfloat16 out, because the interpreter truncates where a GPU rounds."""
        return self.size((torch.bfloat16, torch.float16, torch.float32), (torch.float16, torch.float32))

    @property
    def model_dtype(self) -> torch.dtype:
        return self.size(torch.bfloat16, torch.float32)
