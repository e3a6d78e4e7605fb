"""`Ops` on a CPU, in plain torch: the reference for all others, and the fallback where numba is absent."""

from typing import Protocol

import torch

from engine.models.config import Activation
from engine.models.decoder import Decoder, float32_logits
from engine.models.ops import Attention, Ops
from engine.runners.step_plan import StepPlan


class CPUOps(Ops, Protocol):
    """Of one step at a time: `begin` a plan, then its layers in order."""

    def begin(self, plan: StepPlan) -> None: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The head: x [L, hidden] in the model's dtype -> float32 [L, vocab_size], a tensor of its own."""
        ...


class TorchOps:
    """`cache`: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in the model's dtype, written in
    place.
    """

    def __init__(self, model: Decoder, cache: torch.Tensor) -> None:
        self.model, self.cache = model, cache

    def begin(self, plan: StepPlan) -> None:
        block_size = self.cache.shape[4]
        self.plan = plan
        self.positions = torch.from_numpy(plan.positions)
        slots = torch.from_numpy(plan.slots)
        self.blocks, self.offsets = slots // block_size, slots % block_size

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of any number of them."""
        scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return (h * scale * weight).to(self.model.dtype)

    def add_norm(
        self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, delta_norm: torch.Tensor | None
    ) -> torch.Tensor:
        h += delta if delta_norm is None else self.norm(delta.float(), delta_norm)
        return self.norm(h, weight)

    def attention(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        q, plan, block_size = self._cached(attention, qkv), self.plan, self.cache.shape[4]
        out = torch.empty_like(q)
        for b, context in enumerate(plan.contexts.tolist()):
            start, stop = int(plan.starts[b]), int(plan.starts[b + 1])
            table = torch.from_numpy(plan.block_tables[b, : -(-context // block_size)]).long()
            # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, context, head_dim]
            keys, values = self.cache[table, attention.layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
            seen = torch.ones(stop - start, context, dtype=torch.bool).tril(context - (stop - start))
            if attention.window:
                seen = seen.triu(context - (stop - start) + 1 - attention.window)
            out[start:stop] = torch.nn.functional.scaled_dot_product_attention(
                q[start:stop].transpose(0, 1), keys, values, attn_mask=seen, scale=attention.scale, enable_gqa=True
            ).transpose(0, 1)
        return out.flatten(1)

    def write_kv(self, attention: Attention, qkv: torch.Tensor) -> None:
        self._cached(attention, qkv)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return float32_logits(x, self.model.lm_head)

    def _cached(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Rotated queries, [T, heads, head_dim]; keys and values are in the cache."""
        config = self.model.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, config.head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.qk_norm is not None:
            q, k = self.norm(q.float(), attention.qk_norm[0]), self.norm(k.float(), attention.qk_norm[1])
        cos, sin = attention.cos[self.positions, None, :], attention.sin[self.positions, None, :]
        self.cache[self.blocks, attention.layer, 0, :, self.offsets] = self._rotated(k, cos, sin)
        self.cache[self.blocks, attention.layer, 1, :, self.offsets] = v
        return self._rotated(q, cos, sin)

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of leading elements, halves apart; the others pass. [T, heads, head_dim], model dtype in and
        out, computed in float32.
        """
        half = cos.shape[-1]
        first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)
