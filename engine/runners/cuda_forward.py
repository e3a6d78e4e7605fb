"""The model's layers on a GPU: cuBLAS between our own kernels. Nothing here waits for the device, so that a graph can
record it.

The residual stream is float32 whatever the model's dtype, as on the CPU, so that both round alike. Beside bf16 that is
12 bytes per element and norm instead of 8: little against a layer's weights in a decode, or its matmuls in a prompt.
"""

from dataclasses import dataclass

import torch

from engine.kernels.gated_activation import gated_activation
from engine.kernels.paged_attention import paged_attention, workspace_size
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_and_cache import rope_and_cache
from engine.models.llama import LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """T tokens of B sequences as tensors on the device, all int32; fields as in `StepPlan`."""

    token_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T]; -1: a padding row, nothing is cached."""
    starts: torch.Tensor
    """[B + 1]"""
    contexts: torch.Tensor
    """[B]; 0: a padding row."""
    block_tables: torch.Tensor
    """[B, W], rows may be strided."""
    kept: torch.Tensor | None
    """[L] tokens that go on after the last attention; None: all."""
    max_num_queries: int
    num_splits: int
    """Programs that share the keys of one sequence, with one query each."""


def forward(model: LlamaModel, cache: torch.Tensor, step: DeviceStep) -> torch.Tensor | None:
    """What goes into the model's head, [L, hidden] in its dtype; None if L is 0. Writes the step's KV into `cache` (as
    in TorchOps).
    """
    config = model.config
    eps = config.rms_norm_eps
    h = torch.nn.functional.embedding(step.token_ids, model.embed).float()
    x = torch.empty_like(h, dtype=model.dtype)
    q = x.new_empty(len(h), config.num_heads, config.head_dim)
    workspace = None
    if step.num_splits > 1:
        size = workspace_size(len(step.contexts), config.num_heads, config.head_dim, step.num_splits)
        workspace = torch.empty(size, dtype=torch.float32, device=h.device)
    rms_norm(h, model.layers[0].input_norm, eps, x)
    for i, layer in enumerate(model.layers):
        last = i == len(model.layers) - 1
        rope_and_cache(layer.qkv(x), model.cos, model.sin, step.positions, step.slots, cache, i, q, layer.qk_norm, eps)
        if last and step.kept is not None and not len(step.kept):
            return None
        attended = torch.empty_like(q)
        paged_attention(
            q,
            cache,
            i,
            step.block_tables,
            step.starts,
            step.contexts,
            attended,
            scale=config.head_dim**-0.5,
            max_num_queries=step.max_num_queries,
            num_splits=step.num_splits,
            workspace=workspace,
        )
        attended = attended.flatten(1)
        if last and step.kept is not None:
            attended, h = attended.index_select(0, step.kept), h.index_select(0, step.kept)
            x = x.new_empty(h.shape)
        add_rms_norm(h, layer.o(attended), layer.post_norm, eps, x)
        gate_up = layer.gate_up(x)
        active = gate_up.new_empty(len(h), config.intermediate_size)
        gated_activation(gate_up, active, "silu")
        add_rms_norm(h, layer.down(active), model.norm if last else model.layers[i + 1].input_norm, eps, x)
    return x
