"""The setting in which the sections run: on a GPU at full size, or as a rehearsal with the smallest shapes, on CPU
tensors with interpreted kernels.
"""

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


GPU_TRANSPORTS = tuple(transport.KIND for transport in TRANSPORTS if transport.MEMORY == ("GPU",))
"""Transports between two GPUs of one machine. One that reads host memory too is for links between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    rehearsal: bool
    seed: int
    model_dir: Path | None = None
    """Directory of SmolLM2-135M-Instruct, whose golden tokens are known. None: only random models are run."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda:0")

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
