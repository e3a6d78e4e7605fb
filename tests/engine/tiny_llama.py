"""A random Llama small enough for tests: as tensors, as a model directory, and as a plain dense forward to hold the
runner against.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.models.checkpoint import expected_shapes
from engine.models.config import ModelConfig, Rope

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=96,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights of a size that keeps activations near one, so that attention matters."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (values * 0.1 + 1 if len(shape) == 1 else values * (2.0 / shape[1]) ** 0.5).to(dtype)
    return tensors


def write_model_dir(
    model_dir: Path, config: ModelConfig = TINY, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> None:
    """`changes` override keys of config.json; None removes one."""
    raw = {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    } | changes
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    save_file(random_tensors(config) if tensors is None else tensors, model_dir / "model.safetensors")


def dense_logits(config: ModelConfig, tensors: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab] of one whole sequence: no cache, no chunks, float64."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    length, dim, group = len(token_ids), config.head_dim, config.num_heads // config.num_kv_heads
    angle = torch.arange(length).double()[:, None] * config.rope.theta ** -(torch.arange(0, dim, 2).double() / dim)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[None])
        return torch.cat([turned[..., 0], turned[..., 1]], dim=-1)

    def heads(x: torch.Tensor, num: int) -> torch.Tensor:
        return x.view(length, num, dim).transpose(0, 1).contiguous()

    h = weights["model.embed_tokens.weight"][token_ids]
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        x = norm(h, p + "input_layernorm.weight")
        q, k, v = (
            heads(x @ weights[f"{p}self_attn.{part}_proj.weight"].T, num)
            for part, num in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
        )
        keys, values = rotate(k).repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        scores = rotate(q) @ keys.transpose(1, 2) / dim**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        attended = (scores.softmax(-1) @ values).transpose(0, 1).reshape(length, -1)
        h = h + attended @ weights[p + "self_attn.o_proj.weight"].T
        x = norm(h, p + "post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{p}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        h = h + (torch.nn.functional.silu(gate) * up) @ weights[p + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(h, "model.norm.weight") @ weights[head].T
