"""Every architecture against `transformers` on small random weights, from a directory that `transformers` wrote.

Heads of 64 and more are computed by the compiled kernels, heads of 24 by plain torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models.checkpoint import check_model_dir
from engine.models.config import Dtype, ModelConfig
from engine.models.loading import load_model, rope_frequencies
from engine.models.registry import FAMILIES
from engine.runners.cpu_ops import TorchOps
from engine.runners.step_plan import plan_step
from engine.runners.torch_cpu import TorchCPURunner
from tests.engine.runner_driver import make_batch

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS, VOCAB_SIZE = 16, 10, 70, 97
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 40,
    "intermediate_size": 96,
}
PHI3 = {"pad_token_id": 0, "rms_norm_eps": 1e-5}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "llama 3": ("Llama", {"rope_parameters": {**SCALED, "original_max_position_embeddings": 64}}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "hidden_size": 96}),
    "gemma 3": ("Gemma3Text", GEMMA3),
    "gemma 3 stretched": (
        "Gemma3Text",
        GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}}},
    ),
    "phi 3": ("Phi3", PHI3),
    "phi 3 window": ("Phi3", PHI3 | {"sliding_window": 21}),
    "phi 3 long": ("Phi3", PHI3 | {"original_max_position_embeddings": 32}),
    "phi 3 short": ("Phi3", PHI3 | {"original_max_position_embeddings": 128}),
    "phi 4 mini": ("Phi3", PHI3 | {"original_max_position_embeddings": 32, "tie_word_embeddings": True}),
}
FACTORS = {"phi 3 long": 1.0, "phi 3 short": 1.0, "phi 4 mini": 0.75}
"""Those with long RoPE, and the share of a head that turns."""
MAX_MODEL_LEN = {"phi 3 short": 128}
CASES = [
    *((name, head_dim) for name in ARCHITECTURES for head_dim in (64, 24) if (name, head_dim) != ("llama 2", 64)),
    *(("phi 3 window", 96), ("phi 4 mini", 96), ("gemma 3", 256)),
]
"""No llama 2 of 64: its kernels are of another group size, which test_torch_runner.py covers. 96 are the heads of
Phi-3-mini, 256 those of Gemma 3.
"""

TOLERANCE: dict[Dtype, float] = {"bfloat16": 0.04, "float16": 0.005}
"""Of the largest logit."""


@dataclass(frozen=True)
class Reference:
    model_dir: Path
    max_model_len: int | None
    token_ids: list[int]
    logits: torch.Tensor
    """[NUM_TOKENS, VOCAB_SIZE] float64 of a full forward by `transformers`."""


def randomise(model: Any) -> None:
    """Weights of a size that keeps activations near one, so that attention, biases and norms matter."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif values.dim() == 2:
            values *= (2.0 / values.shape[1]) ** 0.5
        parameter.data.copy_(values.to(torch.bfloat16))


def long_rope(num_pairs: int, share: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + i / num_pairs for i in range(num_pairs)],
        "long_factor": [1.5 + 8 * i / num_pairs for i in range(num_pairs)],
    }


def write_reference(model_dir: Path, name: str, head_dim: int, **save: Any) -> Reference:
    family, changes = ARCHITECTURES[name]
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 6 * head_dim,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
    }
    if name in FACTORS:
        changes = changes | {"rope_parameters": long_rope(int(FACTORS[name] * head_dim) // 2, FACTORS[name])}
    config = getattr(transformers, f"{family}Config")(**(shape | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    if (
        family == "Gemma3Text"
    ):  # scaled up and tied to the head, others would make every token its own likeliest successor
        model.get_input_embeddings().weight.data /= 8
    model.save_pretrained(model_dir, **save)
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(token_ids[None]).logits[0].double()
    return Reference(model_dir, MAX_MODEL_LEN.get(name), token_ids.tolist(), logits)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    return write_reference(tmp_path_factory.mktemp("model"), *request.param)


def logits_of_steps(
    reference: Reference, steps: list[int], dtype: Dtype = "float32"
) -> tuple[torch.Tensor, TorchCPURunner]:
    """Logits [len(steps), VOCAB_SIZE] after each of these steps over the sequence, fed as if each step's last token
    were the last known.
    """
    model = load_model(reference.model_dir, dtype, max_model_len=reference.max_model_len)
    config = model.config
    block = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim
    cache = torch.full((NUM_BLOCKS * block,), float("nan"), dtype=model.dtype).view(torch.uint8)
    runner = TorchCPURunner(model, cache, block_size=BLOCK_SIZE, num_threads=1)
    rows, done = [], 0
    for num in steps:
        batch = make_batch([reference.token_ids[: done + num]], [done], [num], [[7, 2, 9, 4, 1]])
        with torch.inference_mode():
            logits = runner.forward(plan_step(batch, BLOCK_SIZE))
        assert logits is not None
        rows.append(logits[0].double())
        done += num
    return torch.stack(rows), runner


@pytest.mark.parametrize(
    "steps", [[NUM_TOKENS], [33, 16, 1, 18, 1, 1], [1] * NUM_TOKENS], ids=["whole", "chunks", "decodes"]
)
def test_logits_are_those_of_transformers(reference: Reference, steps: list[int]) -> None:
    logits, runner = logits_of_steps(reference, steps)
    ends = torch.tensor(steps).cumsum(0) - 1
    expected = reference.logits[ends]
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert isinstance(runner._ops, TorchOps) == (runner.model.config.head_dim % 16 != 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma 3", "phi 3 window", "phi 4 mini"])
def test_what_sets_families_apart_in_16_bits(tmp_path: Path, name: str, head_dim: int, dtype: Dtype) -> None:
    reference = write_reference(tmp_path, name, head_dim)
    logits, _ = logits_of_steps(reference, [40, 29, 1], dtype)
    expected = reference.logits[[39, 68, 69]]
    assert float((logits - expected).abs().max()) < TOLERANCE[dtype] * float(expected.abs().max())


def test_every_architecture_is_compared() -> None:
    assert {f"{family.removesuffix('Text')}ForCausalLM" for family, _ in ARCHITECTURES.values()} == FAMILIES.keys()


def test_shards_that_transformers_wrote(tmp_path: Path) -> None:
    reference = write_reference(tmp_path, "qwen2", 24, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    logits, _ = logits_of_steps(reference, [NUM_TOKENS])
    torch.testing.assert_close(logits[0], reference.logits[-1], rtol=0, atol=1e-4 * float(reference.logits.abs().max()))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {"rope_type": "default", "rope_theta": 1e6},
    ],
    ids=str,
)
def test_rope_frequencies_of_real_models(tmp_path: Path, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "llama3":
        rope = {**rope, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=128, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    ours: ModelConfig = check_model_dir(tmp_path)
    torch.testing.assert_close(
        rope_frequencies(ours.rope, ours.head_dim), model.model.rotary_emb.inv_freq.double(), rtol=1e-6, atol=0
    )
