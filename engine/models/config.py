"""What a Hugging Face model directory says about its model. No torch here: the composition root reads it before
anything is started.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from protocol.errors import ModelError

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What sets an architecture apart from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False
    """Attention reaches back `sliding_window` tokens unless `use_sliding_window` is false; where False, only if it is
    true.
    """
    required: tuple[str, ...] = ()
    """Keys whose absence means something else than in a Llama: they must be there."""


ARCHITECTURES = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(windowed=True, required=("num_key_value_heads",)),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, required=("num_key_value_heads",)),
    "Qwen3ForCausalLM": Traits(qk_norm=True, required=("num_key_value_heads", "head_dim")),
}
"""By the name in `architectures`; Llama 2 and 3, SmolLM and SmolLM2 are all LlamaForCausalLM."""


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
class ModelConfig:
    """Shape of a Llama-like decoder; field names as in `config.json` where it has them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest sequence that is computed as the model was trained, in tokens: its attention window where that is
    shorter.
    """
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every head of q and k before they are rotated."""
    fingerprint: str = ""
    """32 hex digits over shape and weights; empty until `check_model_dir` has seen the weights."""

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        layer += self.head_dim * ((self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias + 2 * self.qk_norm)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


class KVLayoutFields(TypedDict):
    """Keyword arguments of the KV transfer's layout."""

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int


def kv_layout_fields(config: ModelConfig, dtype: Dtype, block_size: int) -> KVLayoutFields:
    """What two engines must agree on before their KV blocks may be copied byte for byte."""
    return KVLayoutFields(
        model=config.fingerprint,
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=config.head_dim,
    )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file of the model directory. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_config(model_dir: Path) -> ModelConfig:
    """Parses `config.json`. Raises ModelError naming the file, the key, what it holds and what is supported."""
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir}: no such model directory")
    path = model_dir / "config.json"
    raw = read_json(path)
    architectures = raw.get("architectures") or "none"
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture} is unknown, expected one of {', '.join(ARCHITECTURES)}")
    traits, rope = ARCHITECTURES[architecture], _rope(path, raw)
    _refuse_unsupported(path, raw, rope)
    for key in traits.required:
        _positive(path, raw, key)
    hidden_size, num_heads = _positive(path, raw, "hidden_size"), _positive(path, raw, "num_attention_heads")
    context = _positive(path, raw, "max_position_embeddings")
    window = raw.get("sliding_window") if raw.get("use_sliding_window", traits.windowed) else None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_positive(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(path, raw, "intermediate_size"),
        num_layers=_positive(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(path, raw, "num_key_value_heads", default=num_heads),
        head_dim=_positive(path, raw, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=_number(path, raw, "rms_norm_eps", default=1e-6),
        rope_theta=_number(path, {**raw, **rope}, "rope_theta", default=10000.0),
        rope_scaling=_rope_scaling(path, rope, context),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=context if window is None else min(context, _positive(path, raw, "sliding_window")),
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
    return config


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Token ids that end an answer: of `generation_config.json` if it names any, else of `config.json`; ascending.
    Raises ModelError.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token_id, int) for token_id in ids):
                raise ModelError(f"{path}: eos_token_id is {value}, expected a token id or a list of them")
            return tuple(sorted(set(ids)))
    return ()


def shape_text(config: ModelConfig) -> str:
    """Canonical text of everything but the fingerprint: what the fingerprint covers beside the weights."""
    return json.dumps({**asdict(config), "fingerprint": ""}, sort_keys=True)


def _positive(path: Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: {key} is {value}, expected a positive integer")
    return value


def _number(path: Path, raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, expected a positive number")
    return float(value)


def _rope(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: `rope_parameters` in newer directories, `rope_scaling` in older ones."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if rope and not isinstance(rope, dict):
            raise ModelError(f"{path}: {key} is {rope}, expected an object")
        if rope:
            return dict(rope)
    return {}


def _rope_scaling(path: Path, rope: dict[str, Any], context: int) -> RopeScaling | None:
    """`context`: the model's, where the parameters name no original one."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling(factor=_number(path, rope, "factor"))
    if rope_type != "llama3":
        raise ModelError(f"{path}: rope type is {rope_type}, supported are default, linear, llama3")
    low, high = _number(path, rope, "low_freq_factor"), _number(path, rope, "high_freq_factor")
    if low >= high:
        raise ModelError(f"{path}: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(
        factor=_number(path, rope, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_positive(path, rope, "original_max_position_embeddings", default=context),
    )


def _refuse_unsupported(path: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    quantized = raw.get("quantization_config") or raw.get("compression_config")
    found = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "mlp_bias": (raw.get("mlp_bias", False), False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), 1.0),
        "quantization_config": ("present" if quantized else "none", "none"),
    }
    for key, (value, supported) in found.items():
        if value != supported:
            raise ModelError(f"{path}: {key} is {value}, supported is {supported}")
