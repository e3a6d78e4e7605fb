"""Weights in memory, joined as the forward pass wants them."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from engine.models.checkpoint import check_entries, check_model_dir, read_entries
from engine.models.config import INT8_SCALES, INT8_VALUES, Dtype, LongRope, ModelConfig, Quantization, Rope
from engine.models.decoder import Decoder, Layer, Linear, StoredLinear
from engine.models.ops import Attention
from engine.models.quantized import Int8Linear, Int8Weight, quantize
from engine.models.registry import FAMILIES

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

Read = Callable[[str], torch.Tensor]
"""Hugging Face tensor name -> tensor in the model's dtype, all on one device."""
ReadInt8 = Callable[[str], Int8Weight | None]
"""Tensor name without `.weight` -> its weights in int8, where the checkpoint holds them."""


def load_model(
    model_dir: Path,
    dtype: Dtype,
    device: str = "cpu",
    max_model_len: int | None = None,
    quantization: Quantization = "none",
) -> Decoder:
    """Loads a checked directory onto a device; `max_model_len` as in `read_config`. int8 weights, which a CPU alone
    computes with, are those of the layers' linears. Raises ModelError as `check_model_dir` does, before any weight is
    read.
    """
    config = check_model_dir(model_dir, max_model_len)
    entries = read_entries(model_dir)
    check_entries(model_dir, config, entries)
    files = {str(entry.file) for entry in entries.values()}
    handles = {file: safe_open(file, framework="pt") for file in files}

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = handles[str(entries[name].file)].get_tensor(name)
        return tensor.to(device, TORCH_DTYPES[dtype])

    def read_int8(stem: str) -> Int8Weight | None:
        names = stem + INT8_VALUES, stem + INT8_SCALES
        if names[0] not in entries:
            return None
        return Int8Weight(*(handles[str(entries[name].file)].get_tensor(name) for name in names))

    return build_model(config, dtype, read, quantization, read_int8)


def build_model(
    config: ModelConfig,
    dtype: Dtype,
    read: Read,
    quantization: Quantization = "none",
    read_int8: ReadInt8 = lambda stem: None,
) -> Decoder:
    """Assembles a model. Holds one layer twice while it is being joined."""
    embed = read("model.embed_tokens.weight")
    ropes = {config.rope, *((config.sliding.rope,) if config.sliding else ())}
    tables = {rope: tuple(table.to(embed.device) for table in rope_tables(config, rope)) for rope in ropes}
    layers = []
    for i in range(config.num_layers):
        sliding = config.sliding if config.is_sliding(i) else None
        cos, sin = tables[sliding.rope if sliding else config.rope]
        window = sliding.window if sliding else 0
        layers.append(_layer(config, i, read, cos, sin, window, None if quantization == "none" else read_int8))
    return Decoder(
        config=config,
        dtype=TORCH_DTYPES[dtype],
        embed=embed,
        layers=tuple(layers),
        norm=_norm_weight(config, read("model.norm.weight")),
        lm_head=embed if config.tie_word_embeddings else read("lm_head.weight"),
    )


def _layer(
    config: ModelConfig,
    i: int,
    read: Read,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: int,
    read_int8: ReadInt8 | None,
) -> Layer:
    """With `read_int8` its linears are int8: as they are stored, else quantised."""
    names = FAMILIES[config.architecture].tensors

    def joined(parts: tuple[str, ...], kind: str = "weight") -> torch.Tensor:
        tensors = [read(f"model.layers.{i}.{part}.{kind}") for part in parts]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def linear(*parts: str, bias: bool = False) -> Linear:
        added = joined(parts, "bias") if bias else None
        if read_int8 is None:
            return StoredLinear(joined(parts), added)
        stored = [weight for part in parts if (weight := read_int8(f"model.layers.{i}.{part}")) is not None]
        if len(stored) < len(parts):
            return Int8Linear(quantize(joined(parts)), added)
        return Int8Linear(Int8Weight(*(torch.cat(tensors) for tensors in zip(*stored, strict=True))), added)

    def norm(name: str) -> torch.Tensor:
        return _norm_weight(config, joined((name,)))

    return Layer(
        input_norm=norm(names.input_norm),
        qkv=linear(*names.qkv, bias=config.qkv_bias),
        attention=Attention(
            layer=i,
            qk_norm=torch.stack([norm(name) for name in names.qk_norm]) if config.qk_norm else None,
            cos=cos,
            sin=sin,
            window=window,
            scale=config.attention_scale,
        ),
        o=linear(names.o),
        attended_norm=None if names.attended_norm is None else norm(names.attended_norm),
        mlp_norm=norm(names.mlp_norm),
        gate_up=linear(*names.gate_up),
        down=linear(names.down),
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
