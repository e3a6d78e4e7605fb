"""Model directories: what is read, what is refused and how the refusal reads; nothing is loaded before the check has
passed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.checkpoint import check_model_dir, checkpoint_dtype, num_parameters
from engine.models.config import Dtype, RopeScaling, kv_layout_fields
from engine.models.config_file import eos_token_ids
from engine.models.loading import load_model
from engine.models.registry import read_config
from engine.runners.cpu_linears import widened_linear
from protocol.errors import ModelError
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_config_is_read_back(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    config = check_model_dir(tmp_path)
    assert replace(config, fingerprint="") == TINY
    assert len(config.fingerprint) == 32
    assert num_parameters(config) == sum(tensor.numel() for tensor in random_tensors(TINY).values())


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
    assert read_config(tmp_path).rope.theta == 5e5


def test_older_directories_keep_scaling_in_rope_scaling_and_theta_beside_it(tmp_path: Path) -> None:
    write_model_dir(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    config = read_config(tmp_path)
    assert config.rope.theta == 5e5
    assert config.rope.scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    write_model_dir(tmp_path, rope_scaling={"type": "linear", "factor": 4})
    assert read_config(tmp_path).rope.scaling == RopeScaling(factor=4.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "longest"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {"sliding_window": 4096}, 1024),
        ("MistralForCausalLM", {"sliding_window": None}, 1024),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, 1024),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("LlamaForCausalLM", {"sliding_window": 64}, 1024),
    ],
)
def test_sequences_stay_within_the_attention_window(
    tmp_path: Path, architecture: str, changes: dict[str, Any], longest: int
) -> None:
    write_model_dir(tmp_path, architectures=[architecture], **changes)
    assert read_config(tmp_path).max_position_embeddings == longest


@pytest.mark.parametrize("change", [{"qkv_bias": True}, {"qk_norm": True}])
def test_parameters_are_counted(change: dict[str, Any]) -> None:
    config = replace(TINY, **change)
    assert num_parameters(config) == sum(tensor.numel() for tensor in random_tensors(config).values())


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
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is unknown, expected one of LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture none is unknown"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"architectures": "MixtralForCausalLM"}, "architecture MixtralForCausalLM is unknown"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type is yarn, supported are default, linear, llama3"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type is dynamic, supported are default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is None, expected a positive number"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": "1"}}, "low_freq_factor is 1, expected a positive number"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        ({"rope_scaling": [8.0]}, r"rope_scaling is \[8.0\], expected an object"),
        ({"rope_theta": -1}, "rope_theta is -1, expected a positive number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, expected a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, supported is 1.0"),
        ({"mlp_bias": True}, "mlp_bias is True, supported is False"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": None}, "head_dim is None, expected a positive integer"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None},
            "num_key_value_heads is None, expected a positive",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0, expected a positive integer",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias is True, supported is False"),
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
    for header, message in (
        (b"not json", "header cannot be read"),
        (b'{"a": {"dtype": "F32"}}', "header is malformed"),
    ):
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
        changed = {key: value for key, value in tensors.items() if key != name} | (
            {} if wrong is None else {name: wrong}
        )
        write_model_dir(tmp_path, tensors=changed)
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_of_a_checkpoint_is_in_its_headers(tmp_path: Path, dtype: Dtype) -> None:
    """Whatever config.json names, and where some tensors are of another."""
    tensors = random_tensors(TINY, getattr(torch, dtype))
    others = {name: tensor.double() if "norm" in name else tensor for name, tensor in tensors.items()}
    for held in (tensors, others):
        write_model_dir(tmp_path, tensors=held, torch_dtype="float64", dtype="int8")
        assert checkpoint_dtype(tmp_path) == dtype


def test_the_dtype_of_a_mixed_checkpoint_is_that_of_most_bytes(tmp_path: Path) -> None:
    """In shards: four tensors of 1000 bytes and one of 4004, then one of 6000."""
    shards = {"a.safetensors": {f"{i}": torch.zeros(500, dtype=torch.float16) for i in range(4)}}
    shards["b.safetensors"] = {"long": torch.zeros(1001)}
    for expected, more in (("float32", None), ("float16", torch.zeros(3000, dtype=torch.float16))):
        if more is not None:
            shards["c.safetensors"] = {"more": more}
        for file, tensors in shards.items():
            save_file(tensors, tmp_path / file)
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert checkpoint_dtype(tmp_path) == expected


def test_the_dtype_of_a_directory_without_weights_is_what_its_config_names(tmp_path: Path) -> None:
    write_model_dir(tmp_path, torch_dtype="float16")
    (tmp_path / "model.safetensors").unlink()
    assert checkpoint_dtype(tmp_path) == "float16"
    for keys, message in (
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, None),
        (
            {"torch_dtype": "float64"},
            r"config\.json: torch_dtype is float64, expected one of bfloat16, float16, float32",
        ),
        ({"dtype": ["float32"]}, r"config\.json: dtype is \['float32'\], expected one of"),
        (
            {},
            r"config\.json: torch_dtype is None, expected one of bfloat16, float16, float32 where there are no weights",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        if message is None:
            assert checkpoint_dtype(tmp_path) == "bfloat16"
            continue
        with pytest.raises(ModelError, match=message):
            checkpoint_dtype(tmp_path)


def test_weights_of_unknown_dtypes_alone_are_named(tmp_path: Path) -> None:
    write_model_dir(tmp_path, tensors={"a": torch.zeros(4, dtype=torch.int8), "b": torch.zeros(4, dtype=torch.float64)})
    with pytest.raises(ModelError, match=r"the weights are F64, I8, expected one of BF16, F16, F32"):
        checkpoint_dtype(tmp_path)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 33])
def test_linears_of_float16_sum_in_float32(num_rows: int, bias: bool) -> None:
    """A sum of 4096 ones in float16 would end at 2048. More weights than are widened at a time."""
    weight, added = torch.ones(300, 4096, dtype=torch.float16), torch.arange(300).half() if bias else None
    y = widened_linear(weight, added)(torch.ones(num_rows, 4096, dtype=torch.float16))
    expected = 4096 + (torch.arange(300) if bias else torch.zeros(300))
    assert torch.equal(y, expected.half().expand(num_rows, 300))


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32), "lm_head.weight": torch.zeros(97, 96)}
    write_model_dir(tmp_path, tensors=tensors | known)
    check_model_dir(tmp_path)
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
    ):
        write_model_dir(tmp_path, tensors=tensors | {name: torch.zeros(4)})
        with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} has no place in a LlamaForCausalLM"):
            check_model_dir(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", 3])
def test_an_index_names_files_beside_it(tmp_path: Path, file: object) -> None:
    write_model_dir(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelError, match=rf"weight_map names {file}, expected a file beside it"):
        check_model_dir(tmp_path)


def test_weights_that_are_used_as_they_are_stored_stay_in_the_file(tmp_path: Path) -> None:
    """Engines of one machine share these pages, and nobody copies them when an engine starts."""
    write_model_dir(tmp_path)
    model = load_model(tmp_path, "float32")
    mapped = [
        [int(bound, 16) for bound in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "model.safetensors"))
    ]
    assert any(begin <= model.embed.data_ptr() < end for begin, end in mapped)


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
    assert torch.equal(sharded.lm_head, single.lm_head)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: no such file"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 3, (7,)), ([9, 7], 3, (7, 9)), (None, 3, (3,)), (None, None, ()), (0, None, (0,))],
)
def test_eos_comes_from_the_generation_config_first(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["</s>", [2, "</s>"], {"id": 2}])
def test_an_eos_that_is_no_token_id_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is .*, expected a token id or a list of them"):
        eos_token_ids(tmp_path)
