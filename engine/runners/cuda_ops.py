"""`Ops` on a GPU, by our own kernels.

The residual stream is float32 whatever the model's dtype, as on the CPU, so that both round alike. Beside bf16 that is
12 bytes per element and norm instead of 8: little against a layer's weights in a decode, or its matmuls in a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.gated_activation import gated_activation
from engine.kernels.paged_attention import Launch, Workspace, paged_attention
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_and_cache import rope_and_cache
from engine.models.config import Activation
from engine.models.decoder import Decoder
from engine.models.ops import Attention


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
    launches: Mapping[int, Sequence[Launch]]
    """Attention's work, by the windows of the model's layers."""


class CUDAOps:
    """Of one step. `cache`: as in `TorchOps`; `workspace`: attention's, which all steps share in the order of the
    device's work. Nothing here waits for the device, so that a graph can record it.
    """

    def __init__(self, model: Decoder, cache: torch.Tensor, step: DeviceStep, workspace: Workspace) -> None:
        config, device = model.config, cache.device
        self._cache, self._step, self._workspace, self._eps = cache, step, workspace, config.rms_norm_eps
        self._normed = torch.empty(len(step.token_ids), config.hidden_size, dtype=model.dtype, device=device)
        self._q = self._normed.new_empty(len(step.token_ids), config.num_heads, config.head_dim)
        self._attended = torch.zeros_like(self._q)  # padding rows stay 0

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = self._normed[: len(h)]
        rms_norm(h, weight, self._eps, x)
        return x

    def add_norm(
        self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, delta_norm: torch.Tensor | None
    ) -> torch.Tensor:
        x = self._normed[: len(h)]
        if delta_norm is not None:
            rms_norm(delta, delta_norm, self._eps, delta)
        add_rms_norm(h, delta, weight, self._eps, x)
        return x

    def attention(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        self.write_kv(attention, qkv)
        step = self._step
        paged_attention(
            self._q,
            self._cache,
            attention.layer,
            step.block_tables,
            step.starts,
            step.contexts,
            self._attended,
            scale=attention.scale,
            launches=step.launches[attention.window],
            workspace=self._workspace,
            window=attention.window,
        )
        return self._attended.flatten(1)

    def write_kv(self, attention: Attention, qkv: torch.Tensor) -> None:
        rope_and_cache(
            qkv,
            attention.cos,
            attention.sin,
            self._step.positions,
            self._step.slots,
            self._cache,
            attention.layer,
            self._q,
            attention.qk_norm,
            self._eps,
        )

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        gated_activation(gate_up, out, activation)
        return out
