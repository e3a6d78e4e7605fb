"""Weights of Llama and its kin in memory: q/k/v and gate/up fused, on the CPU bf16 linears packed for oneDNN where
torch can.

h = embed[token]                                    [T, hidden]
per layer:  h += o(attention(rope(qkv(norm(h)))))   qkv: [T, (num_heads + 2 num_kv_heads) head_dim], order q, k, v;
                                                    with qk_norm: every head of q and k through its norm before rope
            h += down(silu(gate) * up)              gate_up: [T, 2 intermediate], order gate, up
logits = norm(h) @ lm_head.T                        [rows that sample, vocab], float32 whatever the model's dtype
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine.models.checkpoint import check_entries, check_model_dir, read_entries
from engine.models.config import Dtype, ModelConfig

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] -> [T, out], both in the model's dtype."""

TORCH_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[2, head_dim] norm weights of q's and of k's heads, if the model has them."""
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaModel:
    """Weights of one model, read-only from here on; several runners of one process may share them."""

    config: ModelConfig
    dtype: torch.dtype
    embed: torch.Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LlamaLayer, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[vocab_size, hidden_size]; `embed` itself where the two are tied."""
    cos: torch.Tensor
    """[max_position_embeddings, head_dim / 2], float32; `sin` likewise."""
    sin: torch.Tensor


def load_model(model_dir: Path, dtype: Dtype, device: str = "cpu") -> LlamaModel:
    """Loads a checked directory onto a device. Raises ModelError as `check_model_dir` does, before any weight is
    read.
    """
    config = check_model_dir(model_dir)
    entries = read_entries(model_dir)
    check_entries(model_dir, config, entries)
    files = {str(entry.file) for entry in entries.values()}
    handles = {file: safe_open(file, framework="pt") for file in files}

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = handles[str(entries[name].file)].get_tensor(name)
        return tensor.to(device, TORCH_DTYPES[dtype])

    return build_model(config, dtype, read)


def build_model(config: ModelConfig, dtype: Dtype, read: Callable[[str], torch.Tensor]) -> LlamaModel:
    """Assembles a model from `read`: Hugging Face tensor name -> tensor in `dtype`, all on one device.

    Holds one layer twice while it is being fused.
    """
    layers = []
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        qkv = torch.cat([read(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"])
        bias = torch.cat([read(f"{prefix}self_attn.{part}_proj.bias") for part in "qkv"]) if config.qkv_bias else None
        qk_norm = (
            torch.stack([read(f"{prefix}self_attn.{part}_norm.weight") for part in "qk"]) if config.qk_norm else None
        )
        gate_up = torch.cat([read(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")])
        layers.append(
            LlamaLayer(
                input_norm=read(prefix + "input_layernorm.weight"),
                qkv=make_linear(qkv, bias),
                qk_norm=qk_norm,
                o=make_linear(read(prefix + "self_attn.o_proj.weight")),
                post_norm=read(prefix + "post_attention_layernorm.weight"),
                gate_up=make_linear(gate_up),
                down=make_linear(read(prefix + "mlp.down_proj.weight")),
            )
        )
    embed = read("model.embed_tokens.weight")
    cos, sin = rope_tables(config)
    return LlamaModel(
        config=config,
        dtype=TORCH_DTYPES[dtype],
        embed=embed,
        layers=tuple(layers),
        norm=read("model.norm.weight"),
        lm_head=embed if config.tie_word_embeddings else read("lm_head.weight"),
        cos=cos.to(embed.device),
        sin=sin.to(embed.device),
    )


def rope_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency: float32 [max_position_embeddings, head_dim / 2]."""
    angle = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * rope_frequencies(config)
    return angle.cos().float(), angle.sin().float()


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """theta^(-2i / head_dim), scaled as the config says: float64 [head_dim / 2], radians per token."""
    frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.low_freq_factor == math.inf:
        return frequency / scaling.factor
    turns = scaling.original_context * frequency / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`x @ weight.T + bias`; bf16 weights ([out, in]) on a CPU are copied once into oneDNN's own layout where this
    torch offers it.
    """
    if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and can_pack():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

        def packed_linear(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return y

        return packed_linear
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def float32_logits(x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """`x @ lm_head.T` in float32: bf16 has 0.125 between two logits near 20, so as the head's output it would decide
    close calls.
    """
    if x.dtype is torch.float32:
        return torch.nn.functional.linear(x, lm_head)
    if x.is_cuda:
        return torch.mm(x, lm_head.t(), out_dtype=torch.float32)
    return torch.cat([torch.nn.functional.linear(x.float(), rows.float()) for rows in lm_head.split(4096)], dim=1)


def can_pack() -> bool:
    """Whether this torch and CPU run bf16 linears on weights packed for oneDNN."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
