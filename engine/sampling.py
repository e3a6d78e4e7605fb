"""How the next token is chosen from logits [S, vocab]. A draw depends on (seed, index in the whole answer) and the logits, on nothing else."""

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]


def greedy(logits: torch.Tensor) -> Int32:
    """The likeliest token of every row, the first of equals: int32 [S]."""
    return logits.argmax(dim=-1).to(torch.int32).numpy()
