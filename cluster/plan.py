"""`twopass plan` works out what the knobs mean from the configuration and the model's config.json; it starts nothing.

`pool_plan.py` plans one engine of each pool. This file adds what a handoff moves and takes, and the warnings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from cluster.config import ClusterConfig, PoolConfig
from cluster.limits import limit_warnings
from cluster.pool_plan import PoolPlan, Role, Workload, pool_plan, section
from cluster.served_model import check_max_model_len, longest_sequence, with_dtype
from engine.models.config import Dtype
from engine.models.registry import read_config

GIB = 1024**3
MANY_STEPS = 4
"""`long_prefill_token_threshold` is worth a warning when it multiplies the steps of a prompt by this much."""
FAR_ABOVE = 2
"""`max_num_seqs` is worth a warning when it exceeds the sequences that the blocks hold by more than this factor."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that were measured elsewhere. The plan leaves out what needs a rate that is None."""

    transfer_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    load: Workload
    dtype: Dtype | None
    """What the model computes in; None where there is no model."""
    pools: list[PoolPlan]
    prompt_kv_bytes: int
    """Bytes that one handoff moves."""
    transfer_s: float | None
    prefill_s: float | None
    warnings: list[str]


def plan(
    config: ClusterConfig, load: Workload, *, device_memory_bytes: int | None = None, rates: Rates | None = None
) -> Plan:
    """Plans a deployment; the model's weights need not be there.

    Raises ConfigError where nothing can be computed, and ModelError for an unreadable config.json or weights.
    """
    model = (
        read_config(Path(config.model), longest_sequence(config))
        if config.model is not None and config.runner != "arithmetic"
        else None
    )
    config = with_dtype(config)
    if model is not None:
        check_max_model_len(config, model.max_position_embeddings)
    pools = [pool_plan(role, pool, config, model, load, device_memory_bytes) for role, pool in _pools(config)]
    decode, rates = pools[-1], rates or Rates()
    prompt_kv_bytes = ceil(load.prompt_tokens / config.decode.engine.block_size) * decode.block_bytes
    transfer_s = (
        prompt_kv_bytes / rates.transfer_bytes_per_s if rates.transfer_bytes_per_s and config.prefill.replicas else None
    )
    prefill_s = load.prompt_tokens / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s else None
    warnings = [warning for pool in zip(_pools(config), pools, strict=True) for warning in _pool_warnings(*pool, load)]
    warnings += limit_warnings(
        config, prefill_blocks=pools[0].num_usable_blocks + 1, decode_blocks=decode.num_usable_blocks + 1
    )
    if transfer_s is not None and prefill_s is not None and transfer_s > prefill_s:
        warnings.append(
            f"transfer: {transfer_s:.3g} s for one prompt is longer than its prefill, {prefill_s:.3g} s: "
            "it cannot hide behind it"
        )
    return Plan(
        load=load,
        dtype=None if model is None else config.model_dtype,
        pools=pools,
        prompt_kv_bytes=prompt_kv_bytes,
        transfer_s=transfer_s,
        prefill_s=prefill_s,
        warnings=warnings,
    )


def device_memory_bytes(config: ClusterConfig, gib: float | None) -> int | None:
    """Memory of one GPU: `gib` if given, else that of this machine's first GPU. None where no engine needs a GPU, or
    this machine has none.
    """
    if gib is not None:
        return int(gib * GIB)
    if not any(pool.num_gpus for _, pool in _pools(config)):
        return None
    import torch  # takes seconds, which a plan for CPUs does not need to spend

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _pools(config: ClusterConfig) -> list[tuple[Role, PoolConfig]]:
    if not config.prefill.replicas:
        return [("colocated", config.decode)]
    return list(config.pools.items())


def _pool_warnings(given: tuple[str, PoolConfig], pool: PoolPlan, load: Workload) -> Iterator[str]:
    """Yields a warning for each knob of one pool that contradicts another knob or the load."""
    engine, key = given[1].engine, section(pool.role)
    budget, seats, threshold = engine.max_num_batched_tokens, engine.max_num_seqs, engine.long_prefill_token_threshold
    prompt_blocks = ceil(load.prompt_tokens / engine.block_size)
    if (drafts := engine.num_speculative_tokens) and seats * (1 + drafts) > budget:
        yield (
            f"{key}.max_num_seqs: {seats} sequences with {drafts} drafts each do not fit into a step of "
            f"max_num_batched_tokens {budget}"
        )
    if pool.role != "prefill" and seats > FAR_ABOVE * pool.num_contexts:
        yield (
            f"{key}.max_num_seqs: {seats} seats, "
            f"but the blocks hold {pool.num_contexts} sequences of this load: expect preemptions"
        )
    if threshold and (steps := ceil(load.prompt_tokens / threshold)) >= MANY_STEPS * ceil(load.prompt_tokens / budget):
        alone = ceil(load.prompt_tokens / budget)
        yield (
            f"{key}.long_prefill_token_threshold: "
            f"{threshold} makes {steps} steps of a prompt that takes {alone} without it"
        )
    if not engine.enable_chunked_prefill and budget < engine.max_model_len - 1:
        yield (
            f"{key}.max_num_batched_tokens: {budget} is the longest prompt without chunking, max_model_len is "
            f"{engine.max_model_len}"
        )
    if engine.watermark and int(engine.watermark * pool.num_usable_blocks) + prompt_blocks > pool.num_usable_blocks:
        yield (
            f"{key}.watermark: {engine.watermark:g} leaves too little for one prompt: it gets in only when nothing runs"
        )
    if pool.role != "prefill" and pool.num_usable_blocks * engine.block_size < engine.max_model_len - 1:
        tokens = pool.num_usable_blocks * engine.block_size
        yield (
            f"{key}.max_model_len: {engine.max_model_len}, but all blocks together hold {tokens} tokens: "
            "longer requests are refused"
        )
    if engine.cuda_graph_sizes and engine.cuda_graph_sizes[-1] < seats:
        yield (
            f"{key}.cuda_graph_sizes: {engine.cuda_graph_sizes[-1]} is the largest; "
            f"steps of up to {seats} decodes run without a graph"
        )
    if load.prompt_tokens + (0 if pool.role == "prefill" else load.output_tokens) > engine.max_model_len:
        yield f"{key}.max_model_len: {engine.max_model_len} is too short for the load"
    if pool.num_contexts < 1:
        yield f"{key}: {pool.num_usable_blocks} blocks hold not one sequence of this load"
    if pool.steps_per_prompt is None:
        yield (
            f"{key}.max_num_batched_tokens: a prompt of {load.prompt_tokens} tokens never gets in beside "
            f"{pool.num_running} decodes"
        )
