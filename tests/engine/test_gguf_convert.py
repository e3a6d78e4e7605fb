"""GGUF to a Hugging Face directory: names, the rotary row order, tokenizer, chat template; and the result can be
served.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize as gguf_quantize
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.models import gguf_convert
from engine.models.checkpoint import check_model_dir, checkpoint_dtype
from engine.models.config import INT8_SCALES, INT8_VALUES
from engine.models.config_file import eos_token_ids, read_json
from engine.models.decoder import StoredLinear
from engine.models.gguf_convert import LAYER_NAMES, TOP_NAMES, convert_gguf
from engine.models.loading import load_model
from engine.models.quantized import Int8Linear, Int8Weight, dequantize, quantize
from protocol.errors import ModelError
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir

SPECIAL = ["<end>", "<bos>", "<eos>"]
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
"""The printable part of the byte-level alphabet; the rest follows as code points from 256 on."""
ALPHABET = BYTES + [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = ["h e", "he l", "l o", "hel lo", "Ġ hello"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]


def interleaved(weight: torch.Tensor, heads: int) -> np.ndarray:
    """Row order of GGUF's Q and K: element i of a head's first half, then of its second half, then i + 1."""
    rows, columns = weight.shape
    half = rows // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order].reshape(rows, columns).numpy()


def write_gguf(
    path: Path, tensors: dict[str, torch.Tensor], pre: str = "smollm", *, q8_0: Collection[str] = ()
) -> None:
    """q8_0: names of the tensors that are quantised."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(TINY.max_position_embeddings)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_rope_freq_base(TINY.rope.theta)
    writer.add_rope_dimension_count(TINY.head_dim)
    writer.add_layer_norm_rms_eps(TINY.rms_norm_eps)
    writer.add_vocab_size(TINY.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {
        f"model.layers.{i}.{hf}": f"blk.{i}.{name}" for i in range(TINY.num_layers) for name, hf in LAYER_NAMES.items()
    }
    names |= {hf: name for name, hf in TOP_NAMES.items()}
    for name, tensor in tensors.items():
        gguf_name = names[name.removesuffix(".weight")] + ".weight"
        values = tensor.numpy()
        if "attn_q" in gguf_name or "attn_k" in gguf_name:
            values = interleaved(tensor, TINY.num_heads if "attn_q" in gguf_name else TINY.num_kv_heads)
        if name in q8_0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, gguf_quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_tokenizer_and_config_arrive(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    write_gguf(tmp_path / "model.gguf", tensors)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    convert_gguf(tmp_path / "model.gguf", model_dir, lambda text: None)

    config = check_model_dir(model_dir)
    assert (config.num_layers, config.head_dim, config.rope.theta, config.rms_norm_eps) == (2, 64, 10000.0, 1e-5)
    assert config.tie_word_embeddings
    loaded = load_file(model_dir / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name

    assert checkpoint_dtype(model_dir) == "bfloat16"
    assert eos_token_ids(model_dir) == (2,)
    assert read_json(model_dir / "tokenizer_config.json")["chat_template"] == "{{ messages[0]['content'] }}"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode("hello hello<eos>").tokens == ["hello", "Ġhello", "<eos>"]
    assert tokenizer.encode("12").tokens == ["1", "2"]
    text = "hello Ünï 42 <x>\n\té"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_q8_0_is_read_as_it_is(tmp_path: Path) -> None:
    """Beside the weights in bf16; GGUF's quantisation of float32 weights is ours, and that of rounded ones is not."""
    tensors = random_tensors(TINY)
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.shape[1] % 32 == 0]
    write_gguf(tmp_path / "model.gguf", tensors, q8_0=matrices)
    (model_dir := tmp_path / "model").mkdir()
    convert_gguf(tmp_path / "model.gguf", model_dir, lambda text: None)
    check_model_dir(model_dir)
    assert checkpoint_dtype(model_dir) == "bfloat16"
    loaded = load_file(model_dir / "model.safetensors")
    others = set()
    for name in matrices:
        if name.startswith("model.layers."):
            stem = name.removesuffix(".weight")
            kept = Int8Weight(loaded[stem + INT8_VALUES], loaded[stem + INT8_SCALES])
            torch.testing.assert_close(dequantize(kept), loaded[name].float(), rtol=2**-8, atol=0)
            again = quantize(dequantize(kept))
            assert torch.equal(again.values, kept.values) and torch.equal(again.scales, kept.scales)
            others.add(torch.equal(quantize(loaded[name]).scales, kept.scales))
    assert others == {False}
    for dtype in ("bfloat16", "float32"):
        layer = load_model(model_dir, dtype, quantization="int8").layers[1]
        assert isinstance(layer.qkv, Int8Linear) and layer.qkv.weight is not None
        parts = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
        assert torch.equal(layer.qkv.weight.values, torch.cat([loaded[part + INT8_VALUES] for part in parts]))
        assert torch.equal(layer.qkv.weight.scales, torch.cat([loaded[part + INT8_SCALES] for part in parts]))
    assert isinstance(load_model(model_dir, "bfloat16").layers[1].qkv, StoredLinear)


def test_int8_tensors_are_whole_pairs_of_the_right_shapes(tmp_path: Path) -> None:
    tensors, stem = random_tensors(TINY), "model.layers.0.mlp.down_proj"
    kept = quantize(tensors[f"{stem}.weight"])
    pair = {stem + INT8_VALUES: kept.values, stem + INT8_SCALES: kept.scales}
    write_model_dir(tmp_path, tensors=tensors | pair)
    check_model_dir(tmp_path)
    for name, tensor in pair.items():
        for broken in (pair | {name: tensor.float()}, pair | {name: tensor[1:].clone()}):
            write_model_dir(tmp_path, tensors=tensors | broken)
            with pytest.raises(ModelError, match=f"tensor {name} is .*, expected"):
                check_model_dir(tmp_path)
        write_model_dir(tmp_path, tensors=tensors | {name: tensor})
        with pytest.raises(ModelError, match=rf"tensor {name} is .* beside it"):
            check_model_dir(tmp_path)
    other = {"model.norm" + INT8_VALUES: torch.zeros(96, dtype=torch.int8)}
    write_model_dir(tmp_path, tensors=tensors | other)
    with pytest.raises(ModelError, match="has no place"):
        check_model_dir(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no gguf at all, but long enough to be read as a header" * 4)
    with pytest.raises(ModelError, match=r"x\.gguf: cannot be read as GGUF"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, lambda text: None)
    write_gguf(tmp_path / "y.gguf", {}, pre="qwen2")
    with pytest.raises(ModelError, match=r"y\.gguf: tokenizer\.ggml\.pre is qwen2, expected smollm"):
        convert_gguf(tmp_path / "y.gguf", tmp_path, lambda text: None)


def test_a_disk_that_fills_is_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What safetensors raises is none."""

    def save_file(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf_convert, "save_file", save_file)
    write_gguf(tmp_path / "x.gguf", random_tensors(TINY))
    with pytest.raises(OSError, match="model.safetensors: I/O error: No space left on device"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, lambda text: None)
