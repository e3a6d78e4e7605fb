"""`config.json` of a Hugging Face model directory, key by key. Each refusal is a ModelError that names the file, the
key, what it holds and what is supported. No torch here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.config import Rope, RopeScaling
from protocol.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The keys of one JSON object in `path`: of the whole file, or of an object within it."""

    path: Path
    keys: Mapping[str, Any]

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{key} is {value}, expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"{key} is {value}, expected a positive number")
        return float(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        value = self.keys.get(key)
        if not isinstance(value, list) or len(value) != length:
            found = f"a list of {len(value)}" if isinstance(value, list) else value
            raise self.error(f"{key} is {found}, expected a list of {length} numbers")
        entries = ConfigFile(self.path, {f"{key}[{i}]": number for i, number in enumerate(value)})
        return tuple(entries.number(name) for name in entries.keys)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value}, expected true or false")
        return value

    def require(self, key: str, supported: Any) -> None:
        """Absent or null is as good as supported."""
        value = self._value(key, supported)
        if value != supported:
            raise self.error(f"{key} is {value}, supported is {supported}")

    def require_absent(self, *keys: str) -> None:
        for key in keys:
            if self.keys.get(key):
                raise self.error(f"{key} is present, supported is none")

    def section(self, key: str) -> "ConfigFile":
        """The object under a key; without keys where there is none."""
        value = self.keys.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value}, expected an object")
        return ConfigFile(self.path, value)

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.keys.get(key)
        return default if value is None else value


def read_rope(file: ConfigFile) -> Rope:
    """Rotary embedding of a model whose layers all turn alike, over whole heads."""
    parameters = rope_parameters(file)
    either = ConfigFile(file.path, {**file.keys, **parameters.keys})
    either.require("partial_rotary_factor", 1.0)
    return Rope(
        theta=either.number("rope_theta", 10000.0),
        scaling=rope_scaling(parameters, context=file.positive("max_position_embeddings")),
    )


def rope_parameters(file: ConfigFile) -> ConfigFile:
    """`rope_parameters` in newer directories, `rope_scaling` in older ones."""
    newer = file.section("rope_parameters")
    return newer if newer.keys else file.section("rope_scaling")


def rope_type(parameters: ConfigFile) -> Any:
    return parameters.keys.get("rope_type", parameters.keys.get("type", "default"))


def rope_scaling(parameters: ConfigFile, *, context: int) -> RopeScaling | None:
    """`context`: the model's, where the parameters name no original one."""
    kind = rope_type(parameters)
    if kind not in ROPE_TYPES:
        raise parameters.error(f"rope type is {kind}, supported are {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=parameters.number("factor"))
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise parameters.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=parameters.positive("original_max_position_embeddings", default=context),
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
