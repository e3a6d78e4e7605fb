"""Gemma 3, text alone: five sliding layers to each that sees all, with rotary frequencies of their own; norms before
and after attention and MLP, their weights stored less 1; a GELU gate; embeddings scaled by the root of their size.
"""

from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig, Rope, SlidingLayers
from engine.models.config_file import ConfigFile, rope_scaling
from engine.models.family import Family, LayerTensors, read_decoder

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
LAYER_TYPES = ("sliding_attention", "full_attention")


def read_gemma3(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    """Keys whose absence means something else than in a Llama must be there."""
    file.require("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        file.require(key, None)
    file.require("use_bidirectional_attention", False)
    for key in ("head_dim", "num_key_value_heads"):
        file.positive(key)
    everywhere, local = _ropes(file)
    config = read_decoder(file, everywhere, default_tied=True)
    layers = _sliding_layers(file, config.num_layers)
    return replace(
        config,
        sliding=SlidingLayers(window=file.positive("sliding_window"), layers=layers, rope=local) if layers else None,
        qk_norm=True,
        activation="gelu_tanh",
        query_pre_attn_scalar=file.number("query_pre_attn_scalar"),
        embedding_scale=config.hidden_size**0.5,
    )


def _sliding_layers(file: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """By `layer_types`; in older files all but every `sliding_window_pattern`-th."""
    types: Any = file.keys.get("layer_types")
    if types is None:
        pattern = file.positive("sliding_window_pattern", default=6)
        return tuple(i for i in range(num_layers) if (i + 1) % pattern)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        raise file.error(f"layer_types is {types}, expected {num_layers} of {' or '.join(LAYER_TYPES)}")
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def _ropes(file: ConfigFile) -> tuple[Rope, Rope]:
    """Of the layers that see all, and of the sliding ones. Newer files hold an object for each in `rope_parameters`;
    in older ones `rope_scaling` is for the former alone.
    """
    newer = file.section("rope_parameters")
    if newer.keys:
        full, sliding = newer.section("full_attention"), newer.section("sliding_attention")
        thetas = full.number("rope_theta", GLOBAL_THETA), sliding.number("rope_theta", LOCAL_THETA)
    else:
        full, sliding = file.section("rope_scaling"), ConfigFile(file.path, {})
        thetas = file.number("rope_theta", GLOBAL_THETA), file.number("rope_local_base_freq", LOCAL_THETA)
    context = file.positive("max_position_embeddings")
    for parameters in (file, full, sliding):
        parameters.require("partial_rotary_factor", 1.0)
    return (
        Rope(theta=thetas[0], scaling=rope_scaling(full, context=context)),
        Rope(theta=thetas[1], scaling=rope_scaling(sliding, context=context)),
    )


FAMILIES = {
    "Gemma3ForCausalLM": Family(
        read=read_gemma3,
        tensors=LayerTensors(
            attended_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            down_norm="post_feedforward_layernorm",
        ),
        norm_offset=1.0,
    )
}
