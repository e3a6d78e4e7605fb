"""What a deployment knows of its model before any weight is read, and how many KV blocks its engines get of that."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import limits
from cluster.config import ClusterConfig, PoolConfig
from engine.models.checkpoint import check_model_dir, checkpoint_dtype
from engine.models.config import kv_layout_fields
from engine.models.config_file import eos_token_ids
from engine.runners import arithmetic_model
from kv_transfer.layout import KVLayout
from protocol.errors import ConfigError

DEFAULT_KV_CACHE_BYTES = {"torch": 1024**3, "arithmetic": 4 * 1024**2}
"""KV bytes of one engine, by runner, where its pool names neither `num_blocks` nor `kv_cache_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the deployment needs to know of its model before any weight is read."""

    layout_fields: dict[str, Any]
    """Fields of `KVLayout` without the block size."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int

    def layout(self, pool: PoolConfig) -> KVLayout:
        return KVLayout(**self.layout_fields, block_size=pool.engine.block_size)


def with_dtype(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the checkpoint's dtype where `dtype` is auto and a model is read. Raises ModelError."""
    if config.dtype != "auto" or config.model is None or config.runner == "arithmetic":
        return config
    return replace(config, dtype=checkpoint_dtype(Path(config.model)))


def serve_model(config: ClusterConfig) -> ServedModel:
    """Reads the configuration and headers of the model; `with_dtype` has replaced its dtype. Raises ModelError, or
    ConfigError for knobs that the model cannot satisfy.
    """
    if config.model is None or config.runner == "arithmetic":
        fields: dict[str, Any] = arithmetic_model.kv_layout_fields(1)
        served = ServedModel(
            layout_fields=fields, eos_token_ids=(), max_model_len=2**20, vocab_size=arithmetic_model.VOCAB_SIZE
        )
    else:
        path = Path(config.model)
        model = check_model_dir(path, longest_sequence(config))
        served = ServedModel(
            layout_fields={**kv_layout_fields(model, config.model_dtype, 1, config.quantization)},
            eos_token_ids=eos_token_ids(path),
            max_model_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
        )
    del served.layout_fields["block_size"]
    check_max_model_len(config, served.max_model_len)
    for name, pool in config.pools.items():
        if pool.replicas and not is_profiled(pool) and num_blocks(config, pool, served) < 2:
            raise ConfigError(
                f"{name}.kv_cache_bytes: too few for two blocks of {served.layout(pool).block_bytes} bytes"
            )
    return served


def longest_sequence(config: ClusterConfig) -> int:
    """The larger `max_model_len` of the pools. It counts for both, because both must rotate by the same frequencies."""
    return max(pool.engine.max_model_len for pool in config.pools.values() if pool.replicas)


def check_max_model_len(config: ClusterConfig, limit: int) -> None:
    """Raises ConfigError if a pool's `max_model_len` exceeds `limit`, the longest context of the model."""
    for name, pool in config.pools.items():
        if pool.replicas and pool.engine.max_model_len > limit:
            raise ConfigError(f"{name}.max_model_len: {pool.engine.max_model_len} is more than the model's {limit}")


def is_profiled(pool: PoolConfig) -> bool:
    """Whether the pool's engines find out on their GPU how many KV blocks there is room for."""
    return bool(pool.num_gpus) and not pool.engine.num_blocks and not pool.engine.kv_cache_bytes


def num_blocks(config: ClusterConfig, pool: PoolConfig, served: ServedModel) -> int:
    """KV blocks of one engine of the pool, block 0 included. The pool must not be profiled."""
    return (
        pool.engine.num_blocks
        or (pool.engine.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES[config.runner]) // served.layout(pool).block_bytes
    )


def limit_warnings(config: ClusterConfig, served: ServedModel) -> list[str]:
    """Warnings of `cluster.limits`. A profiled engine counts as one with enough blocks: nobody knows yet how many."""
    prefill, decode = (
        2**31 if is_profiled(pool) else num_blocks(config, pool, served) for pool in (config.prefill, config.decode)
    )
    return limits.limit_warnings(config, prefill_blocks=prefill, decode_blocks=decode)


def num_host_blocks(pool: PoolConfig, served: ServedModel) -> int:
    """Blocks of host memory that one engine of the pool may swap KV into."""
    return pool.engine.num_host_blocks or pool.engine.swap_space_bytes // served.layout(pool).block_bytes
