"""`twopass plan`: what the knobs mean, worked out from the configuration and the model's config.json before anything
starts.

blocks            num_blocks, or kv_cache_bytes / block, or (gpu_memory_utilization x device memory - weights -
                  activations) / block
N_max             whole sequences of the load that the usable blocks hold; block 0 is never used
steps per prompt  prompt / what the token budget leaves beside the decodes of a step
ceilings          sequences at once that each budget allows; the lowest one below the load binds
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from cluster.build import DEFAULT_KV_CACHE_BYTES, check_max_model_len, longest_sequence
from cluster.config import ClusterConfig, PoolConfig
from cluster.limits import limit_warnings
from engine.config import EngineConfig
from engine.models.checkpoint import num_parameters
from engine.models.config import ModelConfig, kv_layout_fields
from engine.models.registry import read_config
from engine.runners import arithmetic_model
from kv_transfer.layout import KVLayout
from protocol.errors import ConfigError
from protocol.messages import PoolName

GIB = 1024**3
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
LOGIT_BYTES = 4
MANY_STEPS = 4
"""A threshold that multiplies a prompt's steps by this much is worth a warning."""
FAR_ABOVE = 2
"""So are seats for this many times the sequences that the blocks hold."""

Role = Literal[PoolName, "colocated"]
"""What the engines of a pool are for, where one kind may be for everything."""
Budget = Literal["max_num_seqs", "max_num_batched_tokens", "KV blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be served. `num_running`: answers being written at once, over all engines."""

    prompt_tokens: int
    output_tokens: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured elsewhere; what is None is left out of the plan."""

    transfer_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One engine of a pool; all its engines are alike."""

    role: Role
    replicas: int
    weight_bytes: int
    activation_bytes: int
    """Estimate: the widest layer at a full token budget, and logits for every seat."""
    kv_token_bytes: int
    block_bytes: int
    num_usable_blocks: int
    blocks_from: str
    """The knob that decided."""
    context_tokens: int
    """KV of one sequence at its longest, in tokens."""
    num_contexts: int
    """N_max."""
    num_running: int
    """Decodes of one step at the given load; 0 in a prefill engine."""
    step_tokens: int
    """Of one step at the given load."""
    first_chunk_tokens: int
    """Prompt tokens in the first step of a prompt, beside those decodes."""
    steps_per_prompt: int | None
    """Beside those decodes and other prompts. None: it never gets in."""
    steps_per_lone_prompt: int | None
    """With nothing else in the engine, which lifts `long_prefill_token_threshold`."""
    ceilings: dict[Budget, int]
    binds: Budget | None
    """None: none does at this load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    load: Workload
    pools: list[PoolPlan]
    prompt_kv_bytes: int
    """What a handoff moves."""
    transfer_s: float | None
    prefill_s: float | None
    warnings: list[str]


def plan(
    config: ClusterConfig, load: Workload, *, device_memory_bytes: int | None = None, rates: Rates | None = None
) -> Plan:
    """Raises ConfigError where nothing can be computed, ModelError for an unreadable config.json. Weights need not be
    there.
    """
    model = (
        read_config(Path(config.model), longest_sequence(config))
        if config.model is not None and config.runner != "arithmetic"
        else None
    )
    if model is not None:
        check_max_model_len(config, model.max_position_embeddings)
    pools = [_pool_plan(role, pool, config, model, load, device_memory_bytes) for role, pool in _pools(config)]
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
            f"transfer: {transfer_s:.3g} s for one prompt is longer than its prefill, {prefill_s:.3g} s: it cannot "
            "hide behind it"
        )
    return Plan(
        load=load,
        pools=pools,
        prompt_kv_bytes=prompt_kv_bytes,
        transfer_s=transfer_s,
        prefill_s=prefill_s,
        warnings=warnings,
    )


def gpu_memory_bytes() -> int | None:
    """Of the first GPU of this machine; None where there is none."""
    import torch  # seconds that a plan for CPUs does not need

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _pools(config: ClusterConfig) -> list[tuple[Role, PoolConfig]]:
    if not config.prefill.replicas:
        return [("colocated", config.decode)]
    return list(config.pools.items())


def _pool_plan(
    role: Role,
    pool: PoolConfig,
    config: ClusterConfig,
    model: ModelConfig | None,
    load: Workload,
    device_memory_bytes: int | None,
) -> PoolPlan:
    engine = pool.engine
    layout = _layout(config, model, engine.block_size)
    weight_bytes = num_parameters(model) * DTYPE_BYTES[config.dtype] if model else 0
    activation_bytes = _activation_bytes(model, engine, DTYPE_BYTES[config.dtype]) if model else 0
    num_bytes = None if device_memory_bytes is None else int(engine.gpu_memory_utilization * device_memory_bytes)
    free_bytes = None if num_bytes is None else num_bytes - weight_bytes - activation_bytes
    num_blocks, blocks_from = _num_blocks(_key(role), pool, config.runner, layout.block_bytes, free_bytes)
    context_tokens = load.prompt_tokens if role == "prefill" else load.prompt_tokens + load.output_tokens - 1
    num_contexts = (num_blocks - 1) // ceil(context_tokens / engine.block_size)
    ceilings = _ceilings(role, engine, load, num_contexts)
    wanted = max(ceilings.values()) if role == "prefill" else ceil(load.num_running / pool.replicas)
    lowest = min(ceilings, key=lambda name: (ceilings[name], name != "max_num_batched_tokens"))
    num_running = 0 if role == "prefill" else min(wanted, engine.max_num_seqs, num_contexts)
    decode_tokens = min(num_running * (1 + engine.num_speculative_tokens), engine.max_num_batched_tokens)
    prompt_tokens = _prompt_tokens_per_step(role, engine, load, num_contexts, num_running)
    first_chunk = _first_chunk(engine, load.prompt_tokens, num_running, alone=False)
    lone_chunk = _first_chunk(engine, load.prompt_tokens, 0, alone=True)
    return PoolPlan(
        role=role,
        replicas=pool.replicas,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_token_bytes=layout.token_bytes,
        block_bytes=layout.block_bytes,
        num_usable_blocks=num_blocks - 1,
        blocks_from=blocks_from,
        context_tokens=context_tokens,
        num_contexts=num_contexts,
        num_running=num_running,
        step_tokens=min(engine.max_num_batched_tokens, decode_tokens + prompt_tokens),
        first_chunk_tokens=first_chunk,
        steps_per_prompt=ceil(load.prompt_tokens / first_chunk) if first_chunk else None,
        steps_per_lone_prompt=ceil(load.prompt_tokens / lone_chunk) if lone_chunk else None,
        ceilings=ceilings,
        binds=lowest if role == "prefill" or ceilings[lowest] < wanted else None,
    )


def _layout(config: ClusterConfig, model: ModelConfig | None, block_size: int) -> KVLayout:
    if model is None:
        return KVLayout(**arithmetic_model.kv_layout_fields(block_size))
    return KVLayout(**kv_layout_fields(model, config.dtype, block_size))


def _activation_bytes(model: ModelConfig, engine: EngineConfig, dtype_bytes: int) -> int:
    """Alive at once in the widest layer: the residual and its norm, gate, up and their product; then the logits of
    every sampled token.
    """
    per_token = (2 * model.hidden_size + 3 * model.intermediate_size) * dtype_bytes
    num_logits = engine.max_num_seqs * (1 + engine.num_speculative_tokens)
    return engine.max_num_batched_tokens * per_token + num_logits * model.vocab_size * LOGIT_BYTES


def _num_blocks(key: str, pool: PoolConfig, runner: str, block_bytes: int, free_bytes: int | None) -> tuple[int, str]:
    """`free_bytes`: what a GPU leaves to KV; None: unknown. Block 0 included."""
    engine = pool.engine
    if engine.num_blocks:
        return engine.num_blocks, "num_blocks"
    if engine.kv_cache_bytes or not pool.num_gpus:
        num_bytes, name = (
            engine.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES[runner],
            "kv_cache_bytes" if engine.kv_cache_bytes else "default",
        )
    elif free_bytes is None:
        raise ConfigError(
            f"{key}.num_blocks: unknown: name it, or kv_cache_bytes, or the GPU's memory (--device-memory-gib)"
        )
    else:
        num_bytes, name = free_bytes, "gpu_memory_utilization"
    if num_bytes < 2 * block_bytes:
        raise ConfigError(f"{key}.{name}: leaves {max(0, num_bytes)} bytes to KV, two blocks need {2 * block_bytes}")
    return num_bytes // block_bytes, name


def _ceilings(role: Role, engine: EngineConfig, load: Workload, num_contexts: int) -> dict[Budget, int]:
    """Sequences at once. In a prefill engine the token budget allows as many as fill one step.

    Colocated, every answer of O tokens brings a prompt of P: in the long run P / O prompt tokens come with each decode.
    """
    budget = engine.max_num_batched_tokens
    if role == "prefill":
        allowed = ceil(budget / _chunk_cap(engine, load.prompt_tokens))
    else:
        prompt_share = load.prompt_tokens / load.output_tokens if role == "colocated" else 0.0
        allowed = int(budget / (1 + engine.num_speculative_tokens + prompt_share))
    return {"max_num_seqs": engine.max_num_seqs, "max_num_batched_tokens": allowed, "KV blocks": num_contexts}


def _prompt_tokens_per_step(
    role: Role, engine: EngineConfig, load: Workload, num_contexts: int, num_running: int
) -> int:
    if role == "prefill":
        return min(engine.max_num_seqs, num_contexts) * _chunk_cap(engine, load.prompt_tokens)
    return ceil(num_running * load.prompt_tokens / load.output_tokens) if role == "colocated" else 0


def _chunk_cap(engine: EngineConfig, prompt_tokens: int) -> int:
    """Most tokens of one prompt in one step, beside other prompts."""
    return min(prompt_tokens, engine.max_num_batched_tokens, engine.long_prefill_token_threshold or prompt_tokens)


def _first_chunk(engine: EngineConfig, prompt_tokens: int, num_decodes: int, *, alone: bool) -> int:
    """Tokens of the first step of a prompt; 0: it never gets in. `alone`: nothing else runs, which lifts the threshold.

    Where drafts want more than there is, a prompt gets as many as each decode beyond its one; they make room for one
    that is not cut.
    """
    room = engine.max_num_batched_tokens - num_decodes
    if not engine.enable_chunked_prefill:
        return prompt_tokens if prompt_tokens <= room else 0
    room = max(room - num_decodes * engine.num_speculative_tokens, room // (num_decodes + 1), min(room, 1))
    return min(room, prompt_tokens if alone else _chunk_cap(engine, prompt_tokens))


def _key(role: Role) -> PoolName:
    """Section of the configuration."""
    return "prefill" if role == "prefill" else "decode"


def _pool_warnings(given: tuple[str, PoolConfig], pool: PoolPlan, load: Workload) -> Iterator[str]:
    """Knobs of one pool that contradict each other, or the load."""
    engine, key = given[1].engine, _key(pool.role)
    budget, seats, threshold = engine.max_num_batched_tokens, engine.max_num_seqs, engine.long_prefill_token_threshold
    prompt_blocks = ceil(load.prompt_tokens / engine.block_size)
    if (drafts := engine.num_speculative_tokens) and seats * (1 + drafts) > budget:
        yield (
            f"{key}.max_num_seqs: {seats} sequences with {drafts} drafts each do not fit into a step of "
            f"max_num_batched_tokens {budget}"
        )
    if pool.role != "prefill" and seats > FAR_ABOVE * pool.num_contexts:
        yield (
            f"{key}.max_num_seqs: {seats} seats, but the blocks hold {pool.num_contexts} sequences of this load: "
            "expect preemptions"
        )
    if threshold and (steps := ceil(load.prompt_tokens / threshold)) >= MANY_STEPS * ceil(load.prompt_tokens / budget):
        alone = ceil(load.prompt_tokens / budget)
        yield (
            f"{key}.long_prefill_token_threshold: {threshold} makes {steps} steps of a prompt that takes {alone} "
            "without it"
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
            f"{key}.max_model_len: {engine.max_model_len}, but all blocks together hold {tokens} tokens: longer "
            "requests are refused"
        )
    if engine.cuda_graph_sizes and engine.cuda_graph_sizes[-1] < seats:
        yield (
            f"{key}.cuda_graph_sizes: {engine.cuda_graph_sizes[-1]} is the largest; steps of up to {seats} decodes run "
            "without a graph"
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
