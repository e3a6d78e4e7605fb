"""What sets one family of models apart, as data: how its `config.json` is read and where its weights are in a
checkpoint. No torch here.

A family is one module beside this one with a table `FAMILIES`, and a line in `registry.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.config import ModelConfig, Rope
from engine.models.config_file import ConfigFile


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """Names of a layer's weights below `model.layers.N.`, without `.weight`. Those of a tuple are joined row by row."""

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one that is the three already."""
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    """Where the config says `qk_norm`."""
    o: str = "self_attn.o_proj"
    attended_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two tensors, or one that is the two already."""
    down: str = "mlp.down_proj"
    down_norm: str | None = None

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Of every tensor of a layer, by its name with `.weight` or `.bias`; linear weights are [out, in]."""
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = dict(zip(self.qkv, _joined(self.qkv, q_size, kv_size, kv_size), strict=True))
        gate_up = dict(zip(self.gate_up, _joined(self.gate_up, inner, inner), strict=True))
        shapes: dict[str, tuple[int, ...]] = {f"{self.input_norm}.weight": (hidden,)}
        shapes |= {f"{name}.weight": (rows, hidden) for name, rows in qkv.items()}
        shapes[f"{self.o}.weight"] = (hidden, q_size)
        norms = (self.attended_norm, self.mlp_norm, self.down_norm)
        shapes |= {f"{name}.weight": (hidden,) for name in norms if name is not None}
        shapes |= {f"{name}.weight": (rows, hidden) for name, rows in gate_up.items()}
        shapes[f"{self.down}.weight"] = (hidden, inner)
        if config.qkv_bias:
            shapes |= {f"{name}.bias": (rows,) for name, rows in qkv.items()}
        if config.qk_norm:
            shapes |= {f"{name}.weight": (config.head_dim,) for name in self.qk_norm}
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One name in `architectures`."""

    read: Callable[[ConfigFile, int | None], ModelConfig]
    """From `config.json` and the longest sequence that will be computed (None: the model's own). Raises ModelError."""
    tensors: LayerTensors = LayerTensors()
    norm_offset: float = 0.0
    """What is added to each norm weight of the checkpoint."""


def read_decoder(file: ConfigFile, rope: Rope, *, default_eps: float = 1e-6, default_tied: bool = False) -> ModelConfig:
    """What every family's `config.json` says under the same keys. Raises ModelError for what no family computes."""
    file.require_absent(
        "quantization_config", "compression_config", "vision_config", "audio_config", "num_local_experts", "num_experts"
    )
    file.require("attention_bias", False)
    file.require("mlp_bias", False)
    hidden_size, num_heads = file.positive("hidden_size"), file.positive("num_attention_heads")
    config = ModelConfig(
        architecture=architecture_of(file),
        vocab_size=file.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.positive("intermediate_size"),
        num_layers=file.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=file.positive("num_key_value_heads", default=num_heads),
        head_dim=file.positive("head_dim", default=hidden_size // num_heads),
        rms_norm_eps=file.number("rms_norm_eps", default=default_eps),
        rope=rope,
        tie_word_embeddings=file.flag("tie_word_embeddings", default_tied),
        max_position_embeddings=file.positive("max_position_embeddings"),
    )
    if config.num_heads % config.num_kv_heads:
        raise file.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}")
    if config.rope.rotary_dim(config.head_dim) % 2:
        raise file.error(f"head_dim {config.head_dim} is odd where it turns, rotary embedding needs pairs")
    return config


def architecture_of(file: ConfigFile) -> str:
    """The first name in `architectures`; "none" where there is no name."""
    named = file.keys.get("architectures") or "none"
    return str(named[0] if isinstance(named, list) else named)


def _joined(names: tuple[str, ...], *rows: int) -> tuple[int, ...]:
    """Rows of each of the named tensors."""
    return rows if len(names) == len(rows) else (sum(rows),)
