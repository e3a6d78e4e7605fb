"""The benchmark of int8 weights counts their bytes, and the tokens that they change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import quantization as bench
from engine.models.config import Dtype, Quantization
from engine.models.decoder import Decoder
from engine.models.loading import TORCH_DTYPES, build_model
from engine.models.quantized import quantize
from tests.engine.tiny_llama import TINY, random_tensors


def tiny(model_dir: Path, dtype: Dtype, quantization: Quantization = "none") -> Decoder:
    return build_model(TINY, dtype, random_tensors(TINY, TORCH_DTYPES[dtype]).__getitem__, quantization)


def test_a_divergence_is_counted_by_hand() -> None:
    float32 = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.5, 0.0], [0.0, 0.0, 3.0]])
    logits = float32 + torch.tensor([[1.0], [0.0], [0.0]])  # moves all of a position alike: no error
    assert bench.divergence(logits, float32, [0, 0, 2]) == bench.Divergence(0.0, 0.0, 3, 0, 0.0)
    logits[1, 1] += 0.6
    found = bench.divergence(logits, float32, [0, 0, 2])
    assert (found.unlike, found.led_by) == (1, 0.5)
    assert found.largest == pytest.approx(0.4)
    assert found.rms == pytest.approx(((0.4**2 + 2 * 0.2**2) / 9) ** 0.5)


def test_figures_of_a_short_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ROUNDS_S", 0.0)
    monkeypatch.setattr(bench, "demo_model_dir", lambda say: None)
    monkeypatch.setattr(bench, "load_model", tiny)
    cases = [{"prompt_ids": [1, 2, 3], "greedy_ids": [4, 5]}, {"prompt_ids": [6], "greedy_ids": [7, 8]}]
    golden = json.dumps({"cases": cases})
    monkeypatch.setattr(bench, "GOLDEN", type("Text", (), {"read_text": lambda self: golden})())
    monkeypatch.setattr("sys.argv", ["quantization", "--json"])
    bench.main()
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    matrices = [
        tensor for name, tensor in random_tensors(TINY).items() if name.startswith("model.layers.") and tensor.ndim == 2
    ]
    assert figures["bytes"]["linears"] == sum(2 * matrix.numel() for matrix in matrices)
    assert [row["rows"] for row in figures["linears"]] == list(bench.ROWS)
    assert all(row["int8_ms"] > 0 and row["bfloat16_ms"] > 0 for row in figures["linears"])
    assert {each["num_tokens"] for each in figures["logits"].values()} == {4}
    assert all(each["rms"] > 0 for each in figures["logits"].values())
    monkeypatch.setattr("sys.argv", ["quantization"])
    bench.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 1 + len(bench.ROWS) + 2 + 3


def test_bytes_are_those_of_the_weights_and_their_scales() -> None:
    weight = quantize(torch.randn(40, 64))
    assert sum(part.nbytes for part in weight) == 40 * 64 + 2 * 40 * 64 // 32
