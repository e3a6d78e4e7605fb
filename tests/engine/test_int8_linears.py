"""int8 weights: none is further off than half its scale; every kernel multiplies exactly them, whatever the shape; and
a model's linears, head and embedding have the weights that they should.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.models.config import Dtype
from engine.models.decoder import StoredLinear
from engine.models.loading import TORCH_DTYPES, build_model
from engine.models.quantized import Int8Linear, Int8Weight, dequantize, quantize, widened_linear
from engine.runners import cpu_int8_linears
from engine.runners.cpu_int8_linears import fit_int8_linears, make_linear
from engine.runners.cpu_linears import HAS_NUMBA, NEVER, ROWS, Choice, Shape, one_thread
from tests.engine.test_torch_runner_golden import AVX2_ONLY
from tests.engine.tiny_llama import TINY, random_tensors
from tests.hang import HANG_S

SHAPES = [(1, 32), (31, 96), (64, 256), (97, 288), (200, 544)]
NUM_ROWS = (*range(1, 15), 25, 192, 195, 1026)
MANTISSAS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Several threads would only wait for each other; shares are made for as many as a kernel is told of."""
    with one_thread():
        yield


@pytest.mark.parametrize("size", [1e-9, 3e-7, 1e-5, 1.0, 1e5])
@pytest.mark.parametrize("num_in", [32, 80, 576])
def test_no_weight_is_further_off_than_half_its_scale(num_in: int, size: float) -> None:
    weight = size * torch.randn(50, num_in, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    kept = quantize(weight)
    assert (kept.values.dtype, kept.scales.dtype) == (torch.int8, torch.float16)
    assert kept.values.shape == weight.shape and kept.scales.shape == (50, -(-num_in // 32))
    scales = kept.scales.double().repeat_interleave(32, dim=1)[:, :num_in]
    assert bool(((dequantize(kept).double() - weight.double()).abs() <= scales * 0.5 * (1 + 1e-6)).all())
    assert int(kept.values.min()) >= -127 and not dequantize(kept)[0].any()


def test_what_was_quantised_before_is_quantised_to_the_same() -> None:
    """As long as nothing has been rounded meanwhile: so float32 copies of GGUF's Q8_0 give the file's own values."""
    kept = quantize(torch.randn(40, 576))
    again = quantize(dequantize(kept))
    assert torch.equal(again.values, kept.values) and torch.equal(again.scales, kept.scales)


def check_close(out: torch.Tensor, x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> None:
    """Within half a unit in the last place of x's dtype, and what float32 sums may be off."""
    exact = x.double() @ dequantize(weight).double().T + (0 if bias is None else bias.double())
    assert out.dtype is x.dtype and out.shape == exact.shape
    sums = x.double().abs() @ dequantize(weight).double().abs().T
    tolerance = exact.abs() * MANTISSAS[x.dtype] + 1e-6 * (1 + sums)
    assert bool(((out.double() - exact).abs() <= tolerance).all())


def check_kernels(dtype: torch.dtype) -> None:
    """Every form of an int8 linear against float64."""
    generator = torch.Generator().manual_seed(3)
    for num_out, num_in in SHAPES:
        weight = quantize(torch.randn(num_out, num_in, generator=generator))
        with_bias = torch.randn(num_out, generator=generator).to(dtype)
        for bias in (None, with_bias):
            by_torch = widened_linear(weight, bias)
            panels, widened, both = (make_linear(dtype, first, 2, None, weight, bias) for first in (NEVER, 0, 5))
            for linear in (by_torch, panels, widened, both):
                for num_rows in NUM_ROWS if linear is panels else (1, 4, 5, 200):
                    x = torch.randn(num_rows, num_in, generator=generator).to(dtype)
                    check_close(linear(x), x, weight, bias)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("dtype", MANTISSAS)
def test_every_kernel_multiplies_what_the_weights_stand_for(dtype: torch.dtype) -> None:
    check_kernels(dtype)


@pytest.mark.skipif(
    not HAS_NUMBA or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="this CPU knows no more than AVX2",
)
def test_the_same_on_a_cpu_that_knows_avx2_alone() -> None:
    command = [sys.executable, "-m", "tests.engine.test_int8_linears"]
    ran = subprocess.run(
        command, env=os.environ | AVX2_ONLY, stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=True
    )
    assert ran.stdout.split() == ["AVX2", "False", "False"]


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("num_threads", [1, 3, 16])
def test_a_row_does_not_depend_on_those_beside_it(num_threads: int) -> None:
    weight, x = quantize(torch.randn(130, 544)), torch.randn(1044, 544).bfloat16()
    linear = make_linear(torch.bfloat16, NEVER, num_threads, None, weight, None)
    together = linear(x)
    for first, num_rows in ((0, 1), (1, 2), (5, 7), (9, 13), (0, 193), (187, 25), (1023, 2), (0, 0)):
        assert torch.equal(linear(x[first : first + num_rows]), together[first : first + num_rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_holds_int8_in_its_linears_alone_and_once(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """TINY's `down` has 80 inputs, no whole groups: it stays with torch."""
    monkeypatch.setattr(cpu_int8_linears, "chosen", lambda shapes, *_: dict.fromkeys(shapes, Choice("panels")))
    tensors = random_tensors(TINY, TORCH_DTYPES[dtype])
    model = build_model(TINY, dtype, tensors.__getitem__, "int8")
    assert torch.equal(model.embed, tensors["model.embed_tokens.weight"])
    layer, x = model.layers[0], torch.randn(3, TINY.hidden_size).to(TORCH_DTYPES[dtype])
    plain = build_model(TINY, dtype, tensors.__getitem__).layers[0].qkv
    assert isinstance(plain, StoredLinear) and plain.weight is not None
    before = layer.qkv(x)
    torch.testing.assert_close(before, widened_linear(quantize(plain.weight), None)(x))
    for num_threads in (1, 2):  # the second runner finds them fitted
        fit_int8_linears(model, num_threads)
        for linear in (layer.qkv, layer.o, layer.gate_up):
            assert isinstance(linear, Int8Linear) and (linear.weight is None) == HAS_NUMBA
        assert isinstance(layer.down, Int8Linear) and layer.down.weight is not None
    torch.testing.assert_close(layer.qkv(x), before, rtol=2**-7, atol=1e-3)


def test_without_numba_torch_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_int8_linears, "HAS_NUMBA", False)
    model = build_model(TINY, "bfloat16", random_tensors(TINY, torch.bfloat16).__getitem__, "int8")
    fit_int8_linears(model, 1)
    linear = model.layers[0].o
    assert isinstance(linear, Int8Linear) and linear.weight is not None
    x = torch.randn(5, TINY.num_heads * TINY.head_dim).bfloat16()
    check_close(linear(x), x, linear.weight, None)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_each_dtype_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_int8_linears, "make_linear", lambda *_: lambda x: x)
    monkeypatch.setattr(cpu_int8_linears, "_compile", lambda *_: None)
    asked: list[torch.dtype] = []

    def measure_shape(dtype: torch.dtype, shape: Shape) -> dict[str, list[float]]:
        asked.append(dtype)
        return {"panels": [1.0] * len(ROWS)}

    monkeypatch.setattr(cpu_int8_linears, "measure_shape", measure_shape)
    dtypes: list[Dtype] = ["bfloat16", "float16", "float32"]
    for name in dtypes * 2:
        tensors = random_tensors(TINY, TORCH_DTYPES[name])
        fit_int8_linears(build_model(TINY, name, tensors.__getitem__, "int8"), 1)
    assert len(asked) == 3 * 3 and set(asked) == set(MANTISSAS), "three shapes, measured once for each dtype"


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_both_forms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_int8_linears, "ROWS", (1, 3))
    monkeypatch.setattr(cpu_int8_linears, "COLD_BYTES", 1 << 12)
    seconds = partial(cpu_int8_linears.measure_shape, torch.float16)((40, 64))
    assert {name: len(by_rows) for name, by_rows in seconds.items()} == {"panels": 2, "widened": 2}


if __name__ == "__main__":
    from engine.runners import cpu_matmul

    print(torch.backends.cpu.get_cpu_capability(), cpu_matmul.PAIRS, cpu_matmul.WIDE)
    with one_thread():
        check_kernels(torch.bfloat16)
