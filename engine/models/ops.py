"""What a model computes between its linears: the operations that each kind of hardware has an implementation of.

The residual stream `h` is float32 in every dtype; all else is in the model's dtype, sums and softmax in float32, norm
weights float32.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.config import Activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """What is particular to the attention of one layer."""

    layer: int
    """Where its keys and values are in a block of the cache."""
    qk_norm: torch.Tensor | None
    """[2, head_dim] float32 norm weights of q's and of k's heads, if the model has them."""
    cos: torch.Tensor
    """[max_position_embeddings, rotary_dim / 2] float32; `sin` likewise. A head's first rotary_dim elements turn,
    none where that is 0.
    """
    sin: torch.Tensor
    window: int
    """Tokens that one may see, itself included; 0: the whole context."""
    scale: float
    """What the products of queries and keys are multiplied with."""


class Ops(Protocol):
    """Of one step over a paged cache, T tokens: the layers in order. Tensors returned are valid until the next call."""

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of h [T, hidden], float32 in, model dtype out."""
        ...

    def add_norm(
        self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, delta_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """h += delta in place, then its norm. With `delta_norm`, weights too, it is delta's norm that is added, rounded
        to the model's dtype; `delta` may change.
        """
        ...

    def attention(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """As `write_kv`, then attends causally over the paged cache: [T, num_heads * head_dim]."""
        ...

    def write_kv(self, attention: Attention, qkv: torch.Tensor) -> None:
        """Norms q and k where the model says so (`qkv` may change), rotates both, writes k and v into the step's slots.

        qkv: [T, (num_heads + 2 num_kv_heads) head_dim], order q, k, v.
        """
        ...

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(first half) * second half of the columns."""
        ...
