"""The configuration of a whole deployment: one file, one frozen dataclass per package, all checked before anything
starts.

model, dtype, runner, device    what is served, and on what
log_level                       of every process, see protocol/log.py
prefill, decode                 replicas, num_threads, num_gpus and, beside them, knobs of engine.config.EngineConfig
transfer                        kv_transfer.config.TransferConfig
router                          router.config.RouterConfig
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from cluster.scalars import argument, parse, typed
from engine.config import EngineConfig
from engine.models.config import Dtype, Quantization
from kv_transfer.config import TransferConfig
from protocol.errors import ConfigError
from protocol.log import LogLevel
from protocol.messages import PoolName
from router.config import RouterConfig

T = TypeVar("T")
Tree = dict[str, Any]
"""A mapping whose values are scalars, lists or trees."""

_ENGINE_KNOBS = tuple(f.name for f in fields(EngineConfig))
_POOL_KNOBS = ("replicas", "num_threads", "num_gpus", *_ENGINE_KNOBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """One pool of engines; all its replicas are alike."""

    replicas: int = 1
    num_threads: int | Literal["auto"] = "auto"
    """Threads that one engine computes with. auto: engines on CPUs share this machine's cores equally (cores.py); in
    a given Ray, which knows of no such share, each has one.
    """
    num_gpus: int = 0
    """GPUs of one engine, 0 or 1; with 0 it computes on the CPU. Ray gives the GPUs, and one machine must have those of
    all engines together.
    """
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def threads(self) -> int:
        """`num_threads` as a number. Raises ConfigError while it is auto: cores.py makes a number of that."""
        if self.num_threads == "auto":
            raise ConfigError("num_threads: auto has not been made a number")
        return self.num_threads

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigError(f"replicas: {self.replicas} is below 0")
        if self.num_threads != "auto" and self.num_threads < 1:
            raise ConfigError(f"num_threads: {self.num_threads} is below 1")
        if self.num_gpus not in (0, 1):
            raise ConfigError(
                f"num_gpus: {self.num_gpus} is not 0 or 1: "
                "there is no tensor parallelism, an engine computes on one GPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One deployment. With `prefill.replicas` 0 it is colocated: decode engines compute prompts themselves."""

    model: str | None = None
    """A Hugging Face directory: config.json, safetensors, tokenizer.json. The arithmetic runner needs none."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What the model computes in; all sums are float32. auto: what the checkpoint holds. float32 is exact."""
    quantization: Quantization = "none"
    """int8: the layers' linears have weights in 8 bits, on CPUs alone; head and embedding stay as they are."""
    runner: Literal["torch", "arithmetic"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: each pool computes on what it was given, on GPUs where `num_gpus` is 1. cpu and cuda refuse a pool that was
    given the other.
    """
    log_level: LogLevel = "info"
    """Level of the logs; debug adds lines about every request."""
    prefill: PoolConfig
    decode: PoolConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if self.runner == "torch" and self.model is None:
            raise ConfigError("model: the torch runner needs a model directory")
        if self.decode.replicas < 1:
            raise ConfigError(f"decode.replicas: {self.decode.replicas} is below 1: nothing would write answers")
        if self.prefill.replicas and self.prefill.engine.block_size != self.decode.engine.block_size:
            raise ConfigError(
                f"prefill.block_size: {self.prefill.engine.block_size} differs from decode.block_size "
                f"{self.decode.engine.block_size}: blocks are copied whole between the pools"
            )
        if self.quantization != "none" and self.runner == "arithmetic":
            raise ConfigError(f"quantization: {self.quantization}, but the arithmetic runner has no weights")
        if self.router.disaggregation == "strict" and not self.prefill.replicas:
            raise ConfigError("router.disaggregation: strict refuses every request where prefill.replicas is 0")
        for name, pool in self.pools.items():
            if pool.replicas:
                self._check_device(name, pool)

    @property
    def model_dtype(self) -> Dtype:
        """`dtype` as a model takes it. Raises ConfigError while it is auto: served_model.py replaces that."""
        if self.dtype == "auto":
            raise ConfigError("dtype: auto has not been replaced by the checkpoint's")
        return self.dtype

    @property
    def pools(self) -> dict[PoolName, PoolConfig]:
        return {"prefill": self.prefill, "decode": self.decode}

    def device_of(self, pool: PoolConfig) -> Literal["cpu", "cuda"]:
        """What the pool's engines compute on. That is not what they can see: Ray shows all of a machine's GPUs to an
        engine that was given none.
        """
        return "cuda" if pool.num_gpus else "cpu"

    def _check_device(self, name: PoolName, pool: PoolConfig) -> None:
        if self.runner == "arithmetic" and (pool.num_gpus or self.device == "cuda"):
            key = f"{name}.num_gpus: {pool.num_gpus}" if pool.num_gpus else "device: cuda"
            raise ConfigError(f"{key}, but the arithmetic runner computes on the CPU")
        if self.device not in ("auto", self.device_of(pool)):
            wanted = "0" if pool.num_gpus else "1: an engine takes one GPU"
            raise ConfigError(f"{name}.num_gpus: {pool.num_gpus}, but device {self.device} needs {wanted}")
        if self.quantization != "none" and pool.num_gpus:
            raise ConfigError(
                f"quantization: {self.quantization} is computed on CPUs alone, but {name}.num_gpus is {pool.num_gpus}"
            )
        if self.transfer.checksum and pool.num_gpus:
            raise ConfigError(f"transfer.checksum: reads KV on the host, but {name}.num_gpus is {pool.num_gpus}")


_SCALARS = ("model", "dtype", "quantization", "runner", "device", "log_level")
_SECTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(get_args(PoolName), _POOL_KNOBS),
    "transfer": tuple(f.name for f in fields(TransferConfig)),
    "router": tuple(f.name for f in fields(RouterConfig)),
}
_POOL_HINTS = {**get_type_hints(PoolConfig), **get_type_hints(EngineConfig)}
_HINTS: dict[str, dict[str, Any]] = {
    "": get_type_hints(ClusterConfig),
    **dict.fromkeys(get_args(PoolName), _POOL_HINTS),
    "transfer": get_type_hints(TransferConfig),
    "router": get_type_hints(RouterConfig),
}
"""Types of the keys of each section; "" stands for the keys outside of sections."""


def load(path: Path | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Reads a YAML file, or takes the defaults if `path` is None, and applies `a.b=value` overrides. A value is YAML
    and is typed by its field (scalars.py).

    Raises ConfigError naming the key.
    """
    tree = _read(path) if path else {}
    for override in overrides:
        _override(tree, override)
    return from_tree(_typed(tree))


def _typed(tree: Tree) -> Tree:
    """Reads each scalar as the type of its field demands."""
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = {name: typed(inner, _HINTS.get(key, {}).get(name)) for name, inner in value.items()}
        else:
            found[key] = typed(value, _HINTS[""].get(key))
    return found


def from_tree(tree: Mapping[str, Any]) -> ClusterConfig:
    """Checks the names, types and values of a parsed document.

    Raises ConfigError naming the key, and for an unknown key the nearest known one.
    """
    _check_names("", tree, (*_SCALARS, *_SECTIONS))
    sections: dict[str, Tree] = {}
    for name, known in _SECTIONS.items():
        given = tree.get(name) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: {given!r} is not a mapping")
        _check_names(f"{name}.", given, known)
        sections[name] = dict(given)
    held = sections["prefill"].setdefault("prompt_reservation", "hold")
    if held != "hold":
        raise ConfigError(
            f"prefill.prompt_reservation: {held!r} is not allowed: "
            "a prompt that started in a prefill engine always finishes (hold)"
        )
    if "preemption" in sections["prefill"]:
        raise ConfigError(
            "prefill.preemption: a prefill engine takes all blocks of a prompt at once and never preempts"
        )
    if sections["prefill"].get("num_speculative_tokens"):
        raise ConfigError(
            "prefill.num_speculative_tokens: a prefill engine writes one token of an answer and never drafts"
        )
    return _checked(
        "",
        ClusterConfig,
        {name: tree[name] for name in _SCALARS if name in tree},
        prefill=_pool("prefill.", sections["prefill"]),
        decode=_pool("decode.", sections["decode"]),
        transfer=_checked("transfer.", TransferConfig, sections["transfer"]),
        router=_checked("router.", RouterConfig, sections["router"]),
    )


def _pool(path: str, given: Tree) -> PoolConfig:
    engine = _checked(path, EngineConfig, {name: value for name, value in given.items() if name in _ENGINE_KNOBS})
    return _checked(
        path, PoolConfig, {name: value for name, value in given.items() if name not in _ENGINE_KNOBS}, engine=engine
    )


def _checked(path: str, kind: type[T], given: Tree, **parts: object) -> T:
    """Makes a `kind` from `given`, checked strictly against its annotations, and from `parts`, checked before."""
    hints = get_type_hints(kind)
    checked: dict[str, object] = {}
    for name, value in given.items():
        try:
            # In JSON mode pydantic is strict about scalars, but still makes a tuple of a list.
            checked[name] = TypeAdapter(hints[name]).validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{path}{name}: {value!r} is not allowed: {first['msg']}") from None
    try:
        return kind(**checked, **parts)
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None


def _check_names(path: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    known = tuple(known)
    for name in given:
        if name not in known:
            near = [f"{path}{match}" for match in difflib.get_close_matches(str(name), known, n=1)] or _elsewhere(
                str(name)
            )
            raise ConfigError(f"{path}{name}: no such key" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def _elsewhere(name: str) -> list[str]:
    """Full paths of the keys in other sections that look like `name`."""
    return [path for path, leaf in _leaves() if difflib.get_close_matches(name, [leaf], n=1, cutoff=0.8)]


def _leaves() -> Iterator[tuple[str, str]]:
    for name in _SCALARS:
        yield name, name
    for section, names in _SECTIONS.items():
        for name in names:
            yield f"{section}.{name}", name


def _read(path: Path) -> Tree:
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file holds no mapping")
    return tree


def _override(tree: Tree, text: str) -> None:
    """Applies one `a.b=value` to `tree` in place."""
    path, equals, value = text.partition("=")
    *sections, name = path.strip().split(".")
    if not equals or not name:
        raise ConfigError(f"--set {text}: expected key=value, as in decode.max_num_seqs=64")
    for section in sections:
        inner = tree.get(section)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"--set {text}: {section} is not a section")
        if inner is None:
            inner = tree[section] = {}
        tree = inner
    try:
        tree[name] = argument(value, _HINTS.get(".".join(sections), {}).get(name))
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value is not YAML") from None
