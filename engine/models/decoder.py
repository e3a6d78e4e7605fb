"""The one forward pass of every model and on all hardware: linears here, all between them by `Ops`.

h = embed[token] * scale                            [T, hidden]
per layer:  h += n(o(attention(qkv(norm(h)))))      qkv: [T, (num_heads + 2 num_kv_heads) head_dim], order q, k, v
            h += n(down(activation(gate) * up))     gate, up of norm(h): [T, 2 intermediate]
logits = norm(h) @ lm_head.T                        [rows that sample, vocab], float32 whatever the model's dtype

n is a norm where the family has one, else nothing. Attention is causal, over a window where the layer has one; q and k
pass a norm of each head where the model has it, then rotary embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig
from engine.models.ops import Attention, Ops

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] -> [T, out], both in the model's dtype."""


class StoredLinear:
    """`x @ weight.T + bias` by torch, weight [out, in], until a runner fits it to its hardware: then its weight is held
    only in the form that the runner gave it, and `weight` is None.
    """

    __slots__ = ("_compute", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._compute: Linear = lambda x: torch.nn.functional.linear(x, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x)

    def fit(self, make: Callable[[torch.Tensor, torch.Tensor | None], Linear]) -> None:
        """From here on it computes by what `make` makes of weight and bias. Only once."""
        assert self.weight is not None, "fitted before"
        self._compute = make(self.weight, self.bias)
        self.weight = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norm weights are float32 [hidden]."""

    input_norm: torch.Tensor
    qkv: Linear
    attention: Attention
    o: Linear
    attended_norm: torch.Tensor | None
    """Of what `o` gives, before it is added."""
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    down_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights of one model; several runners of one process may share them. None is changed, but the first runner on a
    CPU may lay out those of the linears as it reads them fastest.
    """

    config: ModelConfig
    dtype: torch.dtype
    embed: torch.Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[vocab_size, hidden_size]; `embed` itself where the two are tied."""


def forward(model: Decoder, ops: Ops, token_ids: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor | None:
    """What goes into the head, [L, hidden] in the model's dtype; None if L is 0. Writes the step's KV.

    token_ids: [T] of the step that `ops` are for. kept: [L] of them go on after the last attention; None: all. On a GPU
    nothing here waits for the device, so that a graph can record it.
    """
    h = _embedded(model, token_ids)
    x = ops.norm(h, model.layers[0].input_norm)
    for layer, then in zip(model.layers, (*model.layers[1:], None), strict=True):
        qkv = layer.qkv(x)
        going_on = kept if then is None else None
        if going_on is not None and not len(going_on):
            ops.write_kv(layer.attention, qkv)
            return None
        attended = ops.attention(layer.attention, qkv)
        if going_on is not None:
            attended, h = attended.index_select(0, going_on), h.index_select(0, going_on)
        x = ops.add_norm(h, layer.o(attended), layer.mlp_norm, layer.attended_norm)
        down = layer.down(ops.gate(layer.gate_up(x), model.config.activation))
        x = ops.add_norm(h, down, model.norm if then is None else then.input_norm, layer.down_norm)
    return x


def _embedded(model: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """[T, hidden] float32; scaled in the model's dtype, and by a factor rounded to it, as the model was trained."""
    rows = torch.nn.functional.embedding(token_ids, model.embed)
    scale = model.config.embedding_scale
    if scale != 1.0:
        rows = rows * torch.tensor(scale, dtype=model.dtype).item()
    return rows.float()


def float32_logits(x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """`x @ lm_head.T` in float32: bf16 has 0.125 between two logits near 20, so as the head's output it would decide
    close calls.
    """
    if x.dtype is torch.float32:
        return torch.nn.functional.linear(x, lm_head)
    if x.is_cuda:
        return torch.mm(x, lm_head.t(), out_dtype=torch.float32)
    return torch.cat([torch.nn.functional.linear(x.float(), rows.float()) for rows in lm_head.split(4096)], dim=1)
