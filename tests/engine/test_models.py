"""Model directories: what is read, what is refused and how the refusal reads; nothing is loaded before the check has passed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.checkpoint import check_model_dir
from engine.models.config import eos_token_ids, kv_layout_fields, read_config
from engine.models.llama import load_model
from protocol.errors import ModelError
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir


def test_config_is_read_back(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    config = check_model_dir(tmp_path)
    assert replace(config, fingerprint="") == TINY
    assert len(config.fingerprint) == 32
    assert config.num_parameters == sum(tensor.numel() for tensor in random_tensors(TINY).values())


def test_kv_layout_fields_name_what_two_caches_must_share(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    config = check_model_dir(tmp_path)
    assert kv_layout_fields(config, "bfloat16", 16) == {
        "model": config.fingerprint,
        "dtype": "bfloat16",
        "num_layers": 2,
        "num_kv_heads": 2,
        "block_size": 16,
        "head_dim": 64,
    }


def test_newer_directories_keep_theta_in_rope_parameters(tmp_path: Path) -> None:
    write_model_dir(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(tmp_path).rope_theta == 5e5


def test_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    write_model_dir(tmp_path / "a", tensors=tensors)
    write_model_dir(tmp_path / "b", tensors=tensors)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] * 1.01
    write_model_dir(tmp_path / "c", tensors=tensors)
    a, b, c = (check_model_dir(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is unknown, expected one of LlamaForCausalLM"),
        ({"architectures": None}, "architecture none is unknown"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type is yarn, supported is default"),
        ({"attention_bias": True}, "attention_bias is True, supported is False"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, supported is silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is present, supported is none"),
    ],
    ids=str,
)
def test_unsupported_configs_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model_dir(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        check_model_dir(tmp_path)
    assert "config.json" in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such model directory"):
        check_model_dir(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        check_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        check_model_dir(tmp_path)
    write_model_dir(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights, expected model\.safetensors or model\.safetensors\.index\.json"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 9, 5000, -1, -5000])
def test_truncated_weights_are_refused_before_they_are_loaded(tmp_path: Path, size: int) -> None:
    write_model_dir(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated"):
        check_model_dir(tmp_path)


def test_a_header_of_something_else_is_refused(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    for header, message in ((b"not json", "header cannot be read"), (b'{"a": {"dtype": "F32"}}', "header is malformed")):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError, match=message):
            check_model_dir(tmp_path)


def test_missing_tensors_wrong_shapes_and_wrong_dtypes_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    name = "model.layers.1.self_attn.k_proj.weight"
    for wrong, message in (
        (None, rf"tensor {name} is missing, expected shape \[128, 96\]"),
        (torch.zeros(96, 128), rf"model\.safetensors: tensor {name} has shape \[96, 128\], expected \[128, 96\]"),
        (torch.zeros(128, 96, dtype=torch.int8), rf"tensor {name} has dtype I8, expected one of BF16, F16, F32"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name} | ({} if wrong is None else {name: wrong})
        write_model_dir(tmp_path, tensors=changed)
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path, "float32")


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    write_model_dir(tmp_path, tensors=tensors)
    single = load_model(tmp_path, "float32")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_model(tmp_path, "float32")
    assert sharded.config == single.config
    x = torch.ones(1, TINY.hidden_size)
    assert torch.equal(sharded.layers[1].gate_up(x), single.layers[1].gate_up(x))
    assert torch.equal(sharded.lm_head(x), single.lm_head(x))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: no such file"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 3, (7,)), ([9, 7], 3, (7, 9)), (None, 3, (3,)), (None, None, ()), (0, None, (0,))],
)
def test_eos_comes_from_the_generation_config_first(tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path) == expected
