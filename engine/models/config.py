"""What one decoder is made of, as its `config.json` says. No torch here: the composition root reads it before anything
is started.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["none", "int8"]
"""Of the weights of the layers' linears (quantized.py)."""
INT8_GROUP = 32
"""Inputs of an output whose int8 weights share a scale; the last group may have fewer."""
INT8_VALUES, INT8_SCALES = ".int8_values", ".int8_scales"
"""Endings, in place of `.weight`, of the tensors that hold a linear's weights in int8 beside the others: int8 [out, in]
and float16 [out, ceil(in / INT8_GROUP)]. They stand in what was converted from GGUF's Q8_0.
"""
Activation = Literal["silu", "gelu_tanh"]
"""What the gate of an MLP passes through; `gelu_tanh` is GELU by its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were slowed to stretch a model's context.

    One that turns r times within `original_context` tokens: `high_freq_factor` times or more, it stays;
    `low_freq_factor` or less, it is divided by `factor`; in between, a blend. Both infinite: all are divided
    ("linear").
    """

    factor: float
    low_freq_factor: float = math.inf
    high_freq_factor: float = math.inf
    original_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Rotary frequencies that are each divided by a factor of their own (Ding et al., "LongRoPE", 2024)."""

    factors: tuple[float, ...]
    """One for each pair of elements that turn."""
    magnitude: float
    """What cos and sin are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of q and k."""

    theta: float
    partial_rotary_factor: float = 1.0
    """Share of a head's leading elements that turn; the others pass."""
    scaling: RopeScaling | LongRope | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that turn."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLayers:
    """Layers in which a token sees only the newest ones."""

    window: int
    """Tokens that are seen, the one that looks included."""
    layers: tuple[int, ...]
    rope: Rope
    """Of these layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder; field names as in `config.json` where it has them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    """Of the layers that see the whole context."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest sequence that is computed as the model was trained, in tokens."""
    sliding: SlidingLayers | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every head of q and k before they are rotated."""
    activation: Activation = "silu"
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root; None: by that of `head_dim`."""
    embedding_scale: float = 1.0
    """What a token's embedding is multiplied with, rounded to the model's dtype first."""
    fingerprint: str = ""
    """32 hex digits over shape and weights; empty until `check_model_dir` has seen the weights."""

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied with."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def is_sliding(self, layer: int) -> bool:
        return self.sliding is not None and layer in self.sliding.layers


class KVLayoutFields(TypedDict):
    """Keyword arguments of the KV transfer's layout."""

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int


def kv_layout_fields(
    config: ModelConfig, dtype: Dtype, block_size: int, quantization: Quantization = "none"
) -> KVLayoutFields:
    """What two engines must agree on before their KV blocks may be copied byte for byte. Quantised weights are others,
    and so is the KV that they give.
    """
    return KVLayoutFields(
        model=config.fingerprint if quantization == "none" else f"{config.fingerprint}-{quantization}",
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=config.head_dim,
    )


def shape_text(config: ModelConfig) -> str:
    """Canonical text of everything but the fingerprint: what the fingerprint covers beside the weights."""
    return json.dumps({**asdict(config), "fingerprint": ""}, sort_keys=True)
