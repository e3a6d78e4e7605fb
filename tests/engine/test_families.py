"""What the `config.json` of Gemma 3 and Phi-3 says, as published ones have it and as newer libraries write it; and what
of it is refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.checkpoint import check_model_dir, expected_shapes
from engine.models.config import LongRope, ModelConfig, Rope, RopeScaling, SlidingLayers
from engine.models.loading import build_model, rope_tables
from engine.models.registry import FAMILIES, read_config
from protocol.errors import ModelError
from tests.engine.tiny_llama import TINY, random_tensors

GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
SHORT, LONG = [1.0 + i / 96 for i in range(48)], [2.0 + i for i in range(48)]
PHI3_MINI_128K = PHI3_MINI_4K | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "sliding_window": 262144,
}
PHI4_MINI = PHI3_MINI_128K | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}


def read(tmp_path: Path, raw: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path, max_model_len)


def test_gemma_3_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B)
    local = tuple(i for i in range(26) if i not in (5, 11, 17, 23))
    assert config.sliding == SlidingLayers(window=512, layers=local, rope=Rope(theta=1e4))
    assert config.rope == Rope(theta=1e6)
    assert (config.activation, config.qk_norm, config.tie_word_embeddings) == ("gelu_tanh", True, True)
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, 1152**0.5)


def test_gemma_3_as_newer_libraries_write_it(tmp_path: Path) -> None:
    stretched = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    raw = {key: value for key, value in GEMMA3_1B.items() if "rope" not in key and key != "sliding_window_pattern"}
    raw |= {
        "layer_types": ["full_attention", *["sliding_attention"] * 25],
        "rope_parameters": {"full_attention": stretched, "sliding_attention": {"rope_theta": 2e4}},
    }
    config = read(tmp_path, raw)
    assert config.rope == Rope(theta=1e6, scaling=RopeScaling(factor=8.0))
    assert config.sliding == SlidingLayers(window=512, layers=tuple(range(1, 26)), rope=Rope(theta=2e4))
    assert read(tmp_path, raw | {"layer_types": ["full_attention"] * 26}).sliding is None


def test_phi_3_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, PHI3_MINI_4K)
    assert (config.head_dim, config.rope) == (96, Rope(theta=1e4))
    assert config.sliding == SlidingLayers(window=2047, layers=tuple(range(32)), rope=config.rope)
    assert read(tmp_path, PHI3_MINI_128K).sliding is None, "no sequence is longer than the window"
    assert read(tmp_path, PHI4_MINI).rope.rotary_dim(128) == 96


@pytest.mark.parametrize(
    ("max_model_len", "factors"), [(None, LONG), (131072, LONG), (4097, LONG), (4096, SHORT), (100, SHORT)]
)
def test_long_rope_is_chosen_by_the_longest_sequence(
    tmp_path: Path, max_model_len: int | None, factors: list[float]
) -> None:
    rope = read(tmp_path, PHI3_MINI_128K, max_model_len).rope
    assert isinstance(rope.scaling, LongRope) and rope.scaling.factors == tuple(factors)
    assert rope.scaling.magnitude == pytest.approx((1 + 5 / 12) ** 0.5), "2^17 is 2^5 times 2^12"
    older = {"type": "su", "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25}
    scaling = read(tmp_path, PHI3_MINI_128K | {"rope_scaling": older}, max_model_len).rope.scaling
    assert scaling == LongRope(factors=tuple(factors), magnitude=1.25)


def test_two_choices_of_long_rope_are_two_models(tmp_path: Path) -> None:
    """KV of one must not be read by the other."""
    raw = PHI3_MINI_128K | {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 192, "num_attention_heads": 2}
    raw |= {"num_key_value_heads": 1, "intermediate_size": 8}
    save_file(random_tensors(read(tmp_path, raw)), tmp_path / "model.safetensors")
    short, long = check_model_dir(tmp_path, 4096), check_model_dir(tmp_path, 4097)
    assert short.fingerprint != long.fingerprint == check_model_dir(tmp_path).fingerprint


def test_magnitude_is_of_cos_and_sin() -> None:
    factors = (1.0,) * (TINY.head_dim // 2)
    plain = rope_tables(TINY, Rope(theta=1e4))
    tall = rope_tables(TINY, Rope(theta=1e4, scaling=LongRope(factors=factors, magnitude=1.5)))
    for ours, theirs in zip(tall, plain, strict=True):
        torch.testing.assert_close(ours, theirs * 1.5)


def test_norm_weights_less_one_stay_exact_in_bfloat16() -> None:
    """1 + 2^-8 lies between two bfloat16 numbers: a sum of that type would lose the weight."""
    config = replace(TINY, architecture="Gemma3ForCausalLM", qk_norm=True)
    weights = {name: torch.full(shape, 2.0**-8).bfloat16() for name, shape in expected_shapes(config).items()}
    model = build_model(config, "bfloat16", weights.__getitem__)
    layer = model.layers[1]
    norms = (
        model.norm,
        layer.input_norm,
        layer.attended_norm,
        layer.mlp_norm,
        layer.down_norm,
        layer.attention.qk_norm,
    )
    for norm in norms:
        assert norm is not None and norm.unique().tolist() == [1 + 2.0**-8]


def test_every_family_names_every_tensor_once() -> None:
    for architecture, family in FAMILIES.items():
        shapes = family.tensors.shapes(replace(TINY, architecture=architecture, qk_norm=True, qkv_bias=True))
        norms = 2 + 2 * (family.tensors.attended_norm is not None)
        qkv, gate_up = len(family.tensors.qkv), len(family.tensors.gate_up)
        assert len(shapes) == 2 * qkv + gate_up + 2 + norms + 2


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation is gelu, supported is gelu_pytorch_tanh"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, supported is None"),
        (GEMMA3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, supported is None"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, supported is False"),
        (GEMMA3_1B, {"head_dim": None}, "head_dim is None, expected a positive integer"),
        (GEMMA3_1B, {"sliding_window": None}, "sliding_window is None, expected a positive integer"),
        (GEMMA3_1B, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None, expected a positive number"),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, "expected 26 of sliding_attention or full_attention"),
        (GEMMA3_1B, {"layer_types": ["linear_attention"] * 26}, "expected 26 of sliding_attention or full_attention"),
        (
            GEMMA3_1B,
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope type is yarn, supported are default, linear, llama3",
        ),
        (GEMMA3_1B, {"vision_config": {"depth": 27}}, "vision_config is present, supported is none"),
        (
            GEMMA3_1B,
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "architecture Gemma3ForConditionalGeneration is unknown, expected one of Llama.*, Gemma3ForCausalLM",
        ),
        (PHI3_MINI_4K, {"num_local_experts": 16}, "num_local_experts is present, supported is none"),
        (PHI3_MINI_4K, {"hidden_act": "gelu"}, "hidden_act is gelu, supported is silu"),
        (PHI3_MINI_4K, {"rope_scaling": {"type": "yarn"}}, "rope type is yarn, supported are default, longrope, su"),
        (
            PHI3_MINI_4K,
            {"partial_rotary_factor": 0.01},
            "partial_rotary_factor is 0.01: 0 of 96 elements of a head turn",
        ),
        (
            PHI3_MINI_4K,
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5: 144 of 96 elements of a head turn",
        ),
        (
            PHI3_MINI_128K,
            {"partial_rotary_factor": 0.75},
            r"short_factor is a list of 48, expected a list of 36 numbers",
        ),
        (PHI3_MINI_128K, {"rope_scaling": {"type": "su"}}, "short_factor is None, expected a list of 48 numbers"),
        (
            PHI3_MINI_128K,
            {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": [*LONG[:-1], 0]}},
            r"long_factor\[47\] is 0, expected a positive number",
        ),
        (
            PHI3_MINI_128K,
            {"original_max_position_embeddings": None},
            "original_max_position_embeddings is None, expected a positive integer",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, raw | changes)
    assert "config.json" in str(caught.value)
