"""Llama 2 and 3, SmolLM and SmolLM2, which are Llamas by name too; Mistral, Qwen2, Qwen3."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.config_file import ConfigFile, read_rope
from engine.models.family import Family, read_decoder


def read_llama(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    file.require("hidden_act", "silu")
    return read_decoder(file, read_rope(file))


def read_mistral(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    return _within_window(file, _with_kv_heads(file), windowed=True)


def read_qwen2(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    return replace(_within_window(file, _with_kv_heads(file), windowed=False), qkv_bias=True)


def read_qwen3(file: ConfigFile, max_model_len: int | None) -> ModelConfig:
    file.positive("head_dim")
    return replace(_within_window(file, _with_kv_heads(file), windowed=False), qk_norm=True)


def _with_kv_heads(file: ConfigFile) -> ModelConfig:
    """The absence of `num_key_value_heads` means something else there than in a Llama: it must be there."""
    file.positive("num_key_value_heads")
    return read_llama(file, None)


def _within_window(file: ConfigFile, config: ModelConfig, *, windowed: bool) -> ModelConfig:
    """Sequences stay within `sliding_window` tokens, if attention has such a window; `windowed`: whether it has where
    `use_sliding_window` is absent.
    """
    if not file.flag("use_sliding_window", windowed) or file.keys.get("sliding_window") is None:
        return config
    longest = min(config.max_position_embeddings, file.positive("sliding_window"))
    return replace(config, max_position_embeddings=longest)


FAMILIES = {
    "LlamaForCausalLM": Family(read=read_llama),
    "MistralForCausalLM": Family(read=read_mistral),
    "Qwen2ForCausalLM": Family(read=read_qwen2),
    "Qwen3ForCausalLM": Family(read=read_qwen3),
}
