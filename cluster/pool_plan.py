"""One engine of a pool under a given load, worked out from the configuration and the model's shape.

blocks            num_blocks, or kv_cache_bytes / block, or (gpu_memory_utilization x device memory - weights -
                  activations) / block
N_max             whole sequences of the load that the usable blocks hold; block 0 is never used
steps per prompt  prompt / what the token budget leaves beside the decodes of a step
ceilings          sequences at once that each budget allows; the lowest one below the load binds
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from cluster.config import ClusterConfig, PoolConfig
from cluster.served_model import DEFAULT_KV_CACHE_BYTES
from engine.config import EngineConfig
from engine.models.checkpoint import expected_shapes
from engine.models.config import INT8_GROUP, ModelConfig, kv_layout_fields
from engine.runners import arithmetic_model
from kv_transfer.layout import KVLayout
from protocol.errors import ConfigError
from protocol.messages import PoolName

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LOGIT_BYTES = 4

Role = Literal[PoolName, "colocated"]
"""What an engine does. A "colocated" engine computes prompts and writes answers."""
Budget = Literal["max_num_seqs", "max_num_batched_tokens", "KV blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The load that is to be served. `num_running` answers are being written at once, over all engines."""

    prompt_tokens: int
    output_tokens: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One engine of a pool; all its engines are alike."""

    role: Role
    replicas: int
    weight_bytes: int
    activation_bytes: int
    """An estimate: activations of the widest layer at a full token budget, and logits for every seat."""
    kv_token_bytes: int
    block_bytes: int
    num_usable_blocks: int
    blocks_from: str
    """The knob that decided how many blocks there are."""
    context_tokens: int
    """Tokens that one sequence has in the KV cache when it is longest."""
    num_contexts: int
    """N_max: whole sequences of the load that the usable blocks hold."""
    num_running: int
    """Decodes of one step at the given load; 0 in a prefill engine."""
    step_tokens: int
    """Tokens of one step at the given load."""
    first_chunk_tokens: int
    """Tokens of a prompt that its first step takes, beside `num_running` decodes."""
    steps_per_prompt: int | None
    """Steps of a prompt beside `num_running` decodes and other prompts. None: the prompt never gets in."""
    steps_per_lone_prompt: int | None
    """Steps of a prompt that is alone in the engine, where `long_prefill_token_threshold` does not count."""
    ceilings: dict[Budget, int]
    binds: Budget | None
    """The budget that limits the engine first. None: no budget does at this load."""


def pool_plan(
    role: Role,
    pool: PoolConfig,
    config: ClusterConfig,
    model: ModelConfig | None,
    load: Workload,
    device_memory_bytes: int | None,
) -> PoolPlan:
    engine = pool.engine
    layout = _layout(config, model, engine.block_size)
    weight_bytes = _weight_bytes(config, model) if model else 0
    activation_bytes = _activation_bytes(model, engine, DTYPE_BYTES[config.model_dtype]) if model else 0
    num_bytes = None if device_memory_bytes is None else int(engine.gpu_memory_utilization * device_memory_bytes)
    free_bytes = None if num_bytes is None else num_bytes - weight_bytes - activation_bytes
    num_blocks, blocks_from = _num_blocks(section(role), pool, config.runner, layout.block_bytes, free_bytes)
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


def _weight_bytes(config: ClusterConfig, model: ModelConfig) -> int:
    """Of one engine. With int8 the matrices of the layers have a byte for each weight, and two for each scale."""
    num_bytes = 0
    for name, shape in expected_shapes(model).items():
        if config.quantization == "int8" and name.startswith("model.layers.") and len(shape) == 2:
            num_bytes += shape[0] * (shape[1] + 2 * ceil(shape[1] / INT8_GROUP))
        else:
            num_bytes += prod(shape) * DTYPE_BYTES[config.model_dtype]
    return num_bytes


def _layout(config: ClusterConfig, model: ModelConfig | None, block_size: int) -> KVLayout:
    if model is None:
        return KVLayout(**arithmetic_model.kv_layout_fields(block_size))
    return KVLayout(**kv_layout_fields(model, config.model_dtype, block_size, config.quantization))


def _activation_bytes(model: ModelConfig, engine: EngineConfig, dtype_bytes: int) -> int:
    """Bytes that are alive at once: in the widest layer the residual, its norm, gate, up and their product; then the
    logits of every sampled token.
    """
    per_token = (2 * model.hidden_size + 3 * model.intermediate_size) * dtype_bytes
    num_logits = engine.max_num_seqs * (1 + engine.num_speculative_tokens)
    return engine.max_num_batched_tokens * per_token + num_logits * model.vocab_size * LOGIT_BYTES


def _num_blocks(key: str, pool: PoolConfig, runner: str, block_bytes: int, free_bytes: int | None) -> tuple[int, str]:
    """Blocks of one engine, block 0 included, and the knob that decided.

    `free_bytes` is what a GPU leaves to KV, None where that is unknown. Raises ConfigError.
    """
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
    """Sequences at once that each budget allows. In a prefill engine the token budget allows as many as fill one step.

    In a colocated engine every answer of O tokens brings a prompt of P tokens, so in the long run P / O prompt tokens
    come with each decode.
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
    """The most tokens of one prompt that a step takes beside other prompts."""
    return min(prompt_tokens, engine.max_num_batched_tokens, engine.long_prefill_token_threshold or prompt_tokens)


def _first_chunk(engine: EngineConfig, prompt_tokens: int, num_decodes: int, *, alone: bool) -> int:
    """Tokens of a prompt that its first step takes; 0 if the prompt never gets in.

    `alone` says that nothing else runs, so that `long_prefill_token_threshold` does not count. Where drafts want more
    tokens than are left, a prompt gets as many as each decode gets beyond its first one. A prompt that may not be cut
    into chunks goes before drafts.
    """
    room = engine.max_num_batched_tokens - num_decodes
    if not engine.enable_chunked_prefill:
        return prompt_tokens if prompt_tokens <= room else 0
    room = max(room - num_decodes * engine.num_speculative_tokens, room // (num_decodes + 1), min(room, 1))
    return min(room, prompt_tokens if alone else _chunk_cap(engine, prompt_tokens))


def section(role: Role) -> PoolName:
    """Name of the configuration section that an engine of this role reads."""
    return "prefill" if role == "prefill" else "decode"
