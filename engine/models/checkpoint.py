"""Safetensors on disk: headers read and checked without loading a weight, and a fingerprint of what they hold. No torch
here.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from engine.models.config import INT8_GROUP, INT8_SCALES, INT8_VALUES, Dtype, ModelConfig, shape_text
from engine.models.config_file import ConfigFile, read_json
from engine.models.registry import FAMILIES, read_config
from protocol.errors import ModelError

DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""By their names in headers."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 1024
IGNORED_TENSORS = ("lm_head.weight", "rotary_emb.inv_freq")
"""Old checkpoints hold what follows from the rest: a tied head, rotary frequencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: bytes [begin, end) of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_model_dir(model_dir: Path, max_model_len: int | None = None) -> ModelConfig:
    """Config with fingerprint of a directory that can be served; reads config (as `read_config` does), headers and a
    few sampled bytes, loads nothing.

    Raises ModelError naming file, tensor, what was expected and what is there.
    """
    config = read_config(model_dir, max_model_len)
    entries = read_entries(model_dir)
    check_entries(model_dir, config, entries)
    return replace(config, fingerprint=_fingerprint(config, entries))


def checkpoint_dtype(model_dir: Path) -> Dtype:
    """What most bytes of a directory's weights are stored in, by their headers; of two with as many bytes, the one that
    comes first in `DTYPES`. What `config.json` names (`dtype`, `torch_dtype` in older directories) where there are no
    weights.

    Raises ModelError naming file, key or dtype, and what is supported.
    """
    if not ((model_dir / SINGLE_FILE).exists() or (model_dir / INDEX_FILE).exists()):
        path = model_dir / "config.json"
        file = ConfigFile(path, read_json(path))
        key = "torch_dtype" if file.keys.get("dtype") is None else "dtype"
        named = file.keys.get(key)
        for dtype in DTYPES.values():
            if named == dtype:
                return dtype
        raise file.error(f"{key} is {named}, expected one of {', '.join(DTYPES.values())} where there are no weights")
    num_bytes: Counter[str] = Counter()
    for entry in read_entries(model_dir).values():
        num_bytes[entry.dtype] += entry.end - entry.begin
    known = [name for name in DTYPES if num_bytes[name]]
    if not known:
        found = ", ".join(sorted(num_bytes)) or "none"
        raise ModelError(f"{model_dir}: the weights are {found}, expected one of {', '.join(DTYPES)}")
    return DTYPES[max(known, key=lambda name: num_bytes[name])]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint must hold, by its Hugging Face name; linear weights are [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = FAMILIES[config.architecture].tensors.shapes(config)
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def num_parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def check_entries(model_dir: Path, config: ModelConfig, entries: dict[str, TensorEntry]) -> None:
    """Raises ModelError for the first tensor that is missing, has another shape or dtype than the config says, or has
    no place in the model: left out, its biases or scales would be missed in every answer."""
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"{model_dir}: tensor {name} is missing, expected shape {list(shape)}")
        if entry.shape != shape:
            raise ModelError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}"
            )
    quantized = _quantized_entries(shapes)
    for name in sorted(entries.keys() - shapes.keys()):
        if name in quantized:
            entry, (stem, ending) = entries[name], name.rsplit(".", 1)
            other = stem + (INT8_SCALES if f".{ending}" == INT8_VALUES else INT8_VALUES)
            if (entry.dtype, entry.shape) != quantized[name] or other not in entries:
                raise ModelError(
                    f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected "
                    f"{quantized[name][0]} {list(quantized[name][1])} and {other} beside it"
                )
        elif not name.endswith(IGNORED_TENSORS):
            raise ModelError(
                f"{entries[name].file}: tensor {name} has no place in a {config.architecture} with this config"
            )


def _quantized_entries(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor that may hold a linear's weights in int8."""
    quantized: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name.startswith("model.layers.") and len(shape) == 2:
            stem, (num_out, num_in) = name.removesuffix(".weight"), shape
            quantized[stem + INT8_VALUES] = "I8", shape
            quantized[stem + INT8_SCALES] = "F16", (num_out, -(-num_in // INT8_GROUP))
    return quantized


def read_entries(model_dir: Path) -> dict[str, TensorEntry]:
    """All tensors of the directory's one file or of its shards, by name. Raises ModelError naming the file."""
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(model_dir):
        entries |= _read_header(file)
    return entries


def _weight_files(model_dir: Path) -> list[Path]:
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(f"{model_dir}: no weights, expected {SINGLE_FILE} or {INDEX_FILE}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: weight_map names {file}, expected a file beside it")
    return [model_dir / name for name in sorted(set(weight_map.values()))]


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """A safetensors file is: header length (8 bytes, little-endian), JSON header, data; offsets in the header count
    from the data.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(
                    f"{file}: truncated or no safetensors file: {size} bytes, its header alone says {header_bytes}"
                )
            header = json.loads(stream.read(header_bytes))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: safetensors header cannot be read: {error}") from None
    data = 8 + header_bytes
    entries: dict[str, TensorEntry] = {}
    try:
        for name, item in header.items():
            if name != "__metadata__":
                begin, end = item["data_offsets"]
                entries[name] = TensorEntry(
                    file=file,
                    dtype=item["dtype"],
                    shape=tuple(item["shape"]),
                    begin=data + int(begin),
                    end=data + int(end),
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: safetensors header is malformed: {error!r}") from None
    expected = max((entry.end for entry in entries.values()), default=data)
    if size != expected:
        raise ModelError(f"{file}: truncated or padded: {size} bytes, expected {expected}")
    return entries


def _fingerprint(config: ModelConfig, entries: dict[str, TensorEntry]) -> str:
    """blake2b-128 over the shape, every tensor's name, dtype and shape, and `SAMPLE_BYTES` from the middle of each."""
    digest = hashlib.blake2b(shape_text(config).encode(), digest_size=16)
    streams = {file: file.open("rb") for file in sorted({entry.file for entry in entries.values()})}
    try:
        for name, entry in sorted(entries.items()):
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            stream = streams[entry.file]
            stream.seek(max(entry.begin, (entry.begin + entry.end - SAMPLE_BYTES) // 2))
            digest.update(stream.read(min(SAMPLE_BYTES, entry.end - entry.begin)))
    finally:
        for stream in streams.values():
            stream.close()
    return digest.hexdigest()
