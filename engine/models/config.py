"""What a Hugging Face model directory says about its model. No torch here: the composition root reads it before anything is started."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from protocol.errors import ModelError

Dtype = Literal["bfloat16", "float32"]

ARCHITECTURES = ("LlamaForCausalLM",)


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
    """Longest sequence the model was trained for, in tokens."""
    fingerprint: str = ""
    """32 hex digits over shape and weights; empty until `check_model_dir` has seen the weights."""

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
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
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture} is unknown, expected one of {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(path, raw)
    hidden_size, num_heads = _positive(path, raw, "hidden_size"), _positive(path, raw, "num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_positive(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(path, raw, "intermediate_size"),
        num_layers=_positive(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(path, raw, "num_key_value_heads", default=num_heads),
        head_dim=_positive(path, raw, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=_positive(path, raw, "max_position_embeddings"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
    return config


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Token ids that end an answer: of `generation_config.json` if it names any, else of `config.json`; ascending."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            return tuple(sorted({value} if isinstance(value, int) else set(value)))
    return ()


def shape_text(config: ModelConfig) -> str:
    """Canonical text of everything but the fingerprint: what the fingerprint covers beside the weights."""
    return json.dumps({**asdict(config), "fingerprint": ""}, sort_keys=True)


def _positive(path: Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} is {value}, expected a positive integer")
    return value


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: `rope_parameters` in newer directories, `rope_scaling` in older ones."""
    rope: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    rope = _rope(raw)
    found = {
        "rope type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "mlp_bias": (raw.get("mlp_bias", False), False),
        "quantization_config": ("present" if raw.get("quantization_config") else "none", "none"),
    }
    for key, (value, supported) in found.items():
        if value != supported:
            raise ModelError(f"{path}: {key} is {value}, supported is {supported}")
