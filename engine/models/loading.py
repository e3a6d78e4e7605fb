"""Weights in memory: joined as the forward pass wants them, bf16 linears on CPUs packed for oneDNN where torch can."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from engine.models.checkpoint import check_entries, check_model_dir, read_entries
from engine.models.config import Dtype, LongRope, ModelConfig, Rope
from engine.models.decoder import Decoder, Layer, Linear
from engine.models.ops import Attention
from engine.models.registry import FAMILIES

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
WIDENED_ROWS = 4
"""From so many rows on, a float16 linear on a CPU without instructions for it is faster in float32."""
WIDENED_ELEMENTS = 2**20
"""Weights that are widened at a time, which leaves them in the cache."""

Read = Callable[[str], torch.Tensor]
"""Hugging Face tensor name -> tensor in the model's dtype, all on one device."""


def load_model(model_dir: Path, dtype: Dtype, device: str = "cpu", max_model_len: int | None = None) -> Decoder:
    """Loads a checked directory onto a device; `max_model_len` as in `read_config`. Raises ModelError as
    `check_model_dir` does, before any weight is read.
    """
    config = check_model_dir(model_dir, max_model_len)
    entries = read_entries(model_dir)
    check_entries(model_dir, config, entries)
    files = {str(entry.file) for entry in entries.values()}
    handles = {file: safe_open(file, framework="pt") for file in files}

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = handles[str(entries[name].file)].get_tensor(name)
        return tensor.to(device, TORCH_DTYPES[dtype])

    return build_model(config, dtype, read)


def build_model(config: ModelConfig, dtype: Dtype, read: Read) -> Decoder:
    """Assembles a model. Holds one layer twice while it is being joined."""
    embed = read("model.embed_tokens.weight")
    ropes = {config.rope, *((config.sliding.rope,) if config.sliding else ())}
    tables = {rope: tuple(table.to(embed.device) for table in rope_tables(config, rope)) for rope in ropes}
    layers = []
    for i in range(config.num_layers):
        sliding = config.sliding if config.is_sliding(i) else None
        cos, sin = tables[sliding.rope if sliding else config.rope]
        layers.append(_layer(config, i, read, cos, sin, sliding.window if sliding else 0))
    return Decoder(
        config=config,
        dtype=TORCH_DTYPES[dtype],
        embed=embed,
        layers=tuple(layers),
        norm=_norm_weight(config, read("model.norm.weight")),
        lm_head=embed if config.tie_word_embeddings else read("lm_head.weight"),
    )


def _layer(config: ModelConfig, i: int, read: Read, cos: torch.Tensor, sin: torch.Tensor, window: int) -> Layer:
    names = FAMILIES[config.architecture].tensors

    def joined(parts: tuple[str, ...], kind: str = "weight") -> torch.Tensor:
        tensors = [read(f"model.layers.{i}.{part}.{kind}") for part in parts]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def norm(name: str) -> torch.Tensor:
        return _norm_weight(config, joined((name,)))

    return Layer(
        input_norm=norm(names.input_norm),
        qkv=make_linear(joined(names.qkv), joined(names.qkv, "bias") if config.qkv_bias else None),
        attention=Attention(
            layer=i,
            qk_norm=torch.stack([norm(name) for name in names.qk_norm]) if config.qk_norm else None,
            cos=cos,
            sin=sin,
            window=window,
            scale=config.attention_scale,
        ),
        o=make_linear(joined((names.o,))),
        attended_norm=None if names.attended_norm is None else norm(names.attended_norm),
        mlp_norm=norm(names.mlp_norm),
        gate_up=make_linear(joined(names.gate_up)),
        down=make_linear(joined((names.down,))),
        down_norm=None if names.down_norm is None else norm(names.down_norm),
    )


def _norm_weight(config: ModelConfig, weight: torch.Tensor) -> torch.Tensor:
    """In float32, which is what every norm computes in: so `1 + weight` of a bf16 checkpoint is the sum that the model
    was trained with, where bf16 would leave it an error of up to 2^-8.
    """
    return weight.float() + FAMILIES[config.architecture].norm_offset


def rope_tables(config: ModelConfig, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency: float32 [max_position_embeddings, rotary_dim / 2]."""
    frequencies = rope_frequencies(rope, config.head_dim)
    angle = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequencies
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, LongRope) else 1.0
    return (angle.cos() * magnitude).float(), (angle.sin() * magnitude).float()


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """theta^(-2i / rotary_dim), scaled as `rope` says: float64 [rotary_dim / 2], radians per token."""
    rotary_dim = rope.rotary_dim(head_dim)
    frequency = rope.theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    scaling = rope.scaling
    if scaling is None:
        return frequency
    if isinstance(scaling, LongRope):
        return frequency / torch.tensor(scaling.factors, dtype=torch.float64)
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
    if (
        weight.dtype is torch.float16
        and weight.device.type == "cpu"
        and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    ):
        return _widened_linear(weight, bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _widened_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """torch's own float16 product sums in float32 too, but multiplies many rows one at a time."""
    panels = weight.split(max(1, WIDENED_ELEMENTS // weight.shape[1]))

    def linear(x: torch.Tensor) -> torch.Tensor:
        if len(x) < WIDENED_ROWS:
            return torch.nn.functional.linear(x, weight, bias)
        wide = x.float()
        y = torch.cat([torch.nn.functional.linear(wide, panel.float()) for panel in panels], dim=1)
        return (y if bias is None else y + bias).half()

    return linear


def can_pack() -> bool:
    """Whether this torch and CPU run bf16 linears on weights packed for oneDNN."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
