"""What a CPU runner computes between its linears, in plain torch: the reference, and the fallback where numba is
absent.

The residual stream `h` is float32 in every dtype; so are the logits; all else is in the model's dtype, sums and softmax
in float32.
"""

from typing import Protocol

import torch

from engine.models.llama import LlamaModel, float32_logits
from engine.runners.step_plan import StepPlan


class CPUOps(Protocol):
    """One step at a time: `begin` a plan, then its layers in order. T tokens; tensors returned are valid until the next
    call.
    """

    def begin(self, plan: StepPlan) -> None: ...

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of h [T, hidden], float32 in, model dtype out."""
        ...

    def add_norm(self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """h += delta in place, then its norm."""
        ...

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Norms q and k where the model says so (`qkv` may change), rotates both, writes k and v into the plan's slots,
        attends causally over the paged cache: [T, num_heads * head_dim]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the columns."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The head: x [L, hidden] in the model's dtype -> float32 [L, vocab_size], a tensor of its own."""
        ...


class TorchOps:
    """`cache`: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in the model's dtype, written in
    place.
    """

    def __init__(self, model: LlamaModel, cache: torch.Tensor) -> None:
        self.model, self.cache = model, cache

    def begin(self, plan: StepPlan) -> None:
        block_size = self.cache.shape[4]
        self.plan = plan
        positions = torch.from_numpy(plan.positions)
        self.cos, self.sin = self.model.cos[positions, None, :], self.model.sin[positions, None, :]
        slots = torch.from_numpy(plan.slots)
        self.blocks, self.offsets = slots // block_size, slots % block_size

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of any number of them."""
        scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return (h * scale * weight.float()).to(self.model.dtype)

    def add_norm(self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h += delta
        return self.norm(h, weight)

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        config, plan = self.model.config, self.plan
        heads, kv_heads, block_size = config.num_heads, config.num_kv_heads, self.cache.shape[4]
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, config.head_dim).split([heads, kv_heads, kv_heads], dim=1)
        norms = self.model.layers[layer].qk_norm
        if norms is not None:
            q, k = self.norm(q.float(), norms[0]), self.norm(k.float(), norms[1])
        q = self._rotate(q)
        self.cache[self.blocks, layer, 0, :, self.offsets] = self._rotate(k)
        self.cache[self.blocks, layer, 1, :, self.offsets] = v
        out = torch.empty_like(q)
        for b, context in enumerate(plan.contexts.tolist()):
            start, stop = int(plan.starts[b]), int(plan.starts[b + 1])
            table = torch.from_numpy(plan.block_tables[b, : -(-context // block_size)]).long()
            # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, context, head_dim]
            keys, values = self.cache[table, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
            mask = torch.ones(stop - start, context, dtype=torch.bool).tril(context - (stop - start))
            out[start:stop] = torch.nn.functional.scaled_dot_product_attention(
                q[start:stop].transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
            ).transpose(0, 1)
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return float32_logits(x, self.model.lm_head)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding, halves apart. [T, heads, head_dim], model dtype in and out, computed in float32."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return rotated.to(x.dtype)
