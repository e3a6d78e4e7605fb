"""Phi-3 and Phi-4-mini: a Llama whose q, k, v and whose gate and up are one tensor each, with rotary embedding over a
part of a head in some, long RoPE in others, and a window in every layer of the oldest.

Long RoPE has two sets of factors, one up to the context of the first training and one beyond. It is chosen once, by the
longest sequence that will be computed, and not by the length of each: what is cached was rotated by one of them.
"""

import math
from dataclasses import replace

from engine.models.config import LongRope, ModelConfig, Rope, SlidingLayers
from engine.models.config_file import ConfigFile, rope_parameters, rope_type
from engine.models.family import Family, LayerTensors, read_decoder

LONG_ROPE = ("longrope", "su")
"""`su` is what the first files call it."""


def read_phi3(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    file.require("hidden_act", "silu")
    config = read_decoder(file, Rope(theta=10000.0), default_eps=1e-5)
    rope = _rope(file, config.head_dim, max_model_len or config.max_position_embeddings)
    sliding = None
    if file.keys.get("sliding_window") is not None:
        window = file.positive("sliding_window")
        if window < config.max_position_embeddings:
            sliding = SlidingLayers(window=window, layers=tuple(range(config.num_layers)), rope=rope)
    return replace(config, rope=rope, sliding=sliding)


def _rope(file: ConfigFile, head_dim: int, longest: int) -> Rope:
    parameters = rope_parameters(file)
    either = ConfigFile(file.path, {**file.keys, **parameters.keys})
    rope = Rope(
        theta=either.number("rope_theta", 10000.0),
        partial_rotary_factor=either.number("partial_rotary_factor", 1.0),
    )
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise file.error(
            f"partial_rotary_factor is {rope.partial_rotary_factor}: {rotary_dim} of {head_dim} elements of a head "
            "turn, expected an even number of them"
        )
    kind = rope_type(parameters)
    if kind == "default":
        return rope
    if kind not in LONG_ROPE:
        raise file.error(f"rope type is {kind}, supported are default, {', '.join(LONG_ROPE)}")
    return replace(rope, scaling=_long_rope(file, parameters, rotary_dim // 2, longest))


def _long_rope(file: ConfigFile, parameters: ConfigFile, num_pairs: int, longest: int) -> LongRope:
    """Magnitude as the model's published code has it: sqrt(1 + ln(stretch) / ln(original context))."""
    key = "original_max_position_embeddings"
    original = (file if file.keys.get(key) is not None else parameters).positive(key)
    stretch = parameters.number("factor", file.positive("max_position_embeddings") / original)
    magnitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    short, long = (parameters.numbers(f"{name}_factor", num_pairs) for name in ("short", "long"))
    return LongRope(
        factors=long if longest > original else short, magnitude=parameters.number("attention_factor", magnitude)
    )


FAMILIES = {
    "Phi3ForCausalLM": Family(
        read=read_phi3, tensors=LayerTensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    )
}
