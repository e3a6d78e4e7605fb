"""The real model: every golden answer, exactly in float32; in 16 bits by teacher forcing, as far as rounding allows.

All of it runs on this CPU's widest instructions, and once more in a process that knows AVX2 alone: other kernels, other
linears.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.quantization import divergence
from bench.rounding import Expected, expected_errors, teacher_forced, with_linears
from cluster.fetch import demo_model_dir
from engine.models.config import Dtype
from engine.models.decoder import Decoder, Linear
from engine.models.loading import load_model
from engine.runners import torch_cpu
from engine.runners.cpu_ops import TorchOps
from protocol.errors import ModelError
from tests.engine.golden import ANSWERS, PROMPTS, forced_logits, greedy_answers
from tests.hang import HANG_S

AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",  # else those of this CPU are added to the name's
}


def load(dtype: Dtype) -> Decoder:
    try:
        return load_model(demo_model_dir(lambda text: None), dtype)
    except ModelError as error:
        pytest.skip(f"no model: {error}")


@pytest.fixture(scope="module")
def float32() -> Decoder:
    return load("float32")


@pytest.fixture(scope="module")
def bfloat16() -> Decoder:
    return load("bfloat16")


@pytest.fixture(scope="module")
def expected(float32: Decoder) -> Expected:
    return expected_errors(float32, PROMPTS, ANSWERS)


@pytest.mark.parametrize("budget", [16, 100, 8192])
def test_float32_gives_every_golden_token(float32: Decoder, budget: int) -> None:
    assert greedy_answers(float32, budget) == ANSWERS


def check_rounded(logits: torch.Tensor, expected: Expected, spacing: float = 1.0) -> None:
    """`logits`: [P, vocab_size] of all answers, one after the other. spacing: the dtype's; bfloat16's is 1."""
    assert logits.dtype is torch.float32
    golden = torch.tensor(ANSWERS).flatten()
    unlike = logits.argmax(1) != golden
    led_by = (
        expected.logits.gather(1, golden[:, None])[:, 0]
        - expected.logits.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    )
    excused = spacing * expected.excused_margins()
    beyond = unlike & (led_by >= excused)
    assert not beyond.any(), (
        f"another token where float32 leads by {led_by[beyond].tolist()}, excused {excused[beyond].tolist()}"
    )
    error = expected.relative_rms(logits) / spacing
    assert 0.85 < error < 1.15, error


def test_bfloat16_errs_as_far_as_it_rounds(bfloat16: Decoder, expected: Expected) -> None:
    """Its errors are of the size that its roundings explain, and so are the margins at which it chooses another
    token.
    """
    check_rounded(forced_logits(bfloat16), expected)


def test_float16_errs_an_eighth_as_far(expected: Expected) -> None:
    """It rounds in the same places, to three bits more."""
    check_rounded(forced_logits(load("float16")), expected, 1 / 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights_err_three_times_as_far_as_bfloat16(dtype: Dtype, expected: Expected) -> None:
    """Their own error is the same in both dtypes; no token is overtaken that leads by more than a tenth."""
    try:
        model = load_model(demo_model_dir(lambda text: None), dtype, quantization="int8")
    except ModelError as error:
        pytest.skip(f"no model: {error}")
    found = divergence(forced_logits(model), expected.logits, [token for answer in ANSWERS for token in answer])
    assert 2.2 < found.rms / expected.rms < 3.2, found
    assert found.unlike <= 4 and found.led_by < 0.1, found


def rounded_halfway(exact: Linear) -> Linear:
    """Sums of half the terms each, rounded before they are added."""

    def computed(x: torch.Tensor) -> torch.Tensor:
        low, high = x.clone(), x.clone()
        low[:, x.shape[1] // 2 :], high[:, : x.shape[1] // 2] = 0, 0
        return exact(low) + exact(high)

    return computed


class RoundedResidual(TorchOps):
    def add_norm(
        self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, delta_norm: torch.Tensor | None
    ) -> torch.Tensor:
        h.copy_((h + delta).bfloat16())
        return self.norm(h, weight)


class KeysOneLate(TorchOps):
    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == self.model.config.num_kv_heads:
            attention = self.model.layers[0].attention
            later = self.positions + 1
            cos, sin = attention.cos[later, None, :], attention.sin[later, None, :]
        return super()._rotated(x, cos, sin)


@pytest.mark.parametrize(
    ("change", "ops"),
    [
        (lambda model: replace(model, config=replace(model.config, rms_norm_eps=1e-3)), None),
        (lambda model: with_linears(model, rounded_halfway, rounded_halfway), None),
        (lambda model: model, RoundedResidual),
        (lambda model: model, KeysOneLate),
    ],
    ids=[
        "the norms' epsilon",
        "linears that round twice",
        "a residual stream in bfloat16",
        "keys rotated by a position more",
    ],
)
def test_a_planted_mistake_is_more_than_rounding_explains(
    bfloat16: Decoder,
    expected: Expected,
    change: Callable[[Decoder], Decoder],
    ops: type[TorchOps] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is seen by the size of the errors; few of them make it choose other tokens."""
    if ops is not None:
        monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: ops(model, cache))
    with pytest.raises(AssertionError):
        check_rounded(teacher_forced(change(bfloat16), PROMPTS, ANSWERS), expected)


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="this CPU knows no more than AVX2"
)
def test_the_same_on_a_cpu_that_knows_avx2_alone(expected: Expected, tmp_path: Path) -> None:
    """The wider instructions are masked off, for torch, oneDNN and our own kernels alike."""
    file = tmp_path / "made"
    command = [sys.executable, "-m", "tests.engine.golden", str(file)]
    ran = subprocess.run(
        command, env=os.environ | AVX2_ONLY, stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=True
    )
    assert ran.stdout.split()[-1] == "AVX2"
    answers, bfloat16, float16 = torch.load(file)
    assert answers == ANSWERS
    check_rounded(bfloat16, expected)
    check_rounded(float16, expected, 1 / 8)
