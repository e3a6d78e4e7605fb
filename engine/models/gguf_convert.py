"""A Llama GGUF file -> a Hugging Face model directory: config, bf16 safetensors, byte-level BPE tokenizer, chat
template.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.config import INT8_GROUP, INT8_SCALES, INT8_VALUES
from protocol.errors import ModelError

CONTROL_TOKEN = 3
"""GGUF's token type for special tokens."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_gguf(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
    """Writes the directory's files into `model_dir`, which must exist. Weights are dequantised, then rounded to bf16.
    Those of Q8_0 are also kept as they are, for `quantization: int8`.

    Raises ModelError if the file is no GGUF file, no Llama, or has another tokenizer than a byte-level BPE of the kind
    "smollm"; OSError if the directory cannot be written.
    """
    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{gguf_file}: cannot be read as GGUF: {error}") from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.get(key) != expected:
            raise ModelError(f"{gguf_file}: {key} is {metadata.get(key)}, expected {expected}")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(model_dir / "config.json", _config(metadata, tied))
    eos, pad, bos = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "padding", "bos"))
    _write_json(model_dir / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})
    _write_json(model_dir / "tokenizer_config.json", _tokenizer_config(metadata))
    (model_dir / "tokenizer.json").write_text(_tokenizer(metadata).to_str(pretty=True), encoding="utf-8")
    num_heads, num_kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    progress(f"dequantising {len(reader.tensors)} tensors")
    tensors = {_name(tensor.name): _weight(tensor, num_heads, num_kv_heads) for tensor in reader.tensors}
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.Q8_0 and tensor.name.startswith("blk."):
            tensors |= _int8_weight(tensor, num_heads, num_kv_heads)
    try:
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"model.safetensors: {error}") from None


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, num_heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": metadata["llama.rope.freq_base"],
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; kind "smollm": every digit is a word of its own, then GPT-2's split."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def _name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for a name that Llama does
    not have.
    """
    stem = gguf_name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return TOP_NAMES[stem] + ".weight"
    part = stem.split(".")
    if len(part) == 3 and part[0] == "blk" and part[2] in LAYER_NAMES:
        return f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"
    raise ModelError(f"GGUF tensor {gguf_name} is not one of a Llama's")


def _weight(tensor: ReaderTensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """bf16, [out, in]"""
    values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    return torch.tensor(_rows_in_order(tensor, values, num_heads, num_kv_heads)).to(torch.bfloat16)


def _int8_weight(tensor: ReaderTensor, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Values and scales of a tensor of Q8_0: its groups are each a float16 scale, then INT8_GROUP int8."""
    stem = _name(tensor.name).removesuffix(".weight")
    rows = _rows_in_order(tensor, tensor.data, num_heads, num_kv_heads)
    groups = rows.reshape(len(rows), -1, 2 + INT8_GROUP)
    return {
        stem + INT8_VALUES: torch.tensor(groups[:, :, 2:].reshape(len(rows), -1).view(np.int8)),
        stem + INT8_SCALES: torch.tensor(groups[:, :, :2].reshape(len(rows), -1).view(np.float16)),
    }


def _rows_in_order(tensor: ReaderTensor, rows: npt.NDArray[Any], num_heads: int, num_kv_heads: int) -> npt.NDArray[Any]:
    """GGUF stores the rotary pairs of Q and K rows interleaved (0, 1, 2, ...); the halves-apart order is restored."""
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return rows
    heads = num_heads if tensor.name.endswith("attn_q.weight") else num_kv_heads
    num, columns = rows.shape
    pairs = rows.reshape(heads, num // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(num, columns))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
