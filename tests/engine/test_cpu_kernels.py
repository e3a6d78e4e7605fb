"""The compiled norms and activations against `engine/kernels/reference.py`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import njit

from engine.kernels import reference
from engine.models.config import Activation
from engine.runners import cpu_kernels
from engine.runners.cpu_elements import Stored, load, store

GATED: dict[Activation, Callable[[Stored, Stored], None]] = {
    "silu": cpu_kernels.silu_mul,
    "gelu_tanh": cpu_kernels.gelu_tanh_mul,
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS = [3, 20]
"""Below and above the number from which rows are shared between threads."""


def stored(tensor: torch.Tensor) -> Stored:
    views = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    array: Stored = tensor.view(views.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def round_all(x: Stored, out: Stored) -> None:
    for i in range(x.shape[1]):
        store(out, 0, i, load(x[0, i]))


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE[ours.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", GATED)
def test_gate_times_up(activation: Activation, rows: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(rows, 2 * 72)).to(dtype)
    out, expected = torch.full((rows, 72), torch.nan, dtype=dtype), torch.zeros(rows, 72, dtype=dtype)
    GATED[activation](stored(gate_up), stored(out))
    reference.gated_activation(gate_up, expected, activation)
    assert_near(out, expected)


@pytest.mark.parametrize("activation", GATED)
def test_far_gates_saturate(activation: Activation) -> None:
    """Where exp(-gate) is beyond float32, too."""
    gates = torch.tensor([[-1000.0, -90.0, -12.0, 12.0, 90.0, 1000.0]])
    out = torch.full((1, 6), torch.nan)
    GATED[activation](stored(torch.cat([gates, torch.full((1, 6), 2.0)], dim=1)), stored(out))
    torch.testing.assert_close(out, 2 * gates.clamp_min(0), rtol=1e-6, atol=2e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("stream", [False, True], ids=["of the model's dtype", "of the stream"])
def test_norm(stream: bool, rows: int, dtype: torch.dtype) -> None:
    """Of the float32 stream and of what a linear gives."""
    h, weight = torch.randn(rows, 72).to(torch.float32 if stream else dtype), torch.randn(72)
    out, expected = torch.full((rows, 72), torch.nan, dtype=dtype), torch.zeros(rows, 72, dtype=dtype)
    cpu_kernels.norm(stored(h), weight.numpy(), np.float32(1e-5), stored(out))
    reference.rms_norm(h, weight, 1e-5, expected)
    assert_near(out, expected)


def test_every_float16_is_read_and_rounded_to_as_torch_does() -> None:
    """Subnormal and infinite ones, ties and overflows too. Neighbours' midpoints, and points right beside those."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = every[every.isfinite()].sort().values.float()
    middle = (halves[1:] + halves[:-1]) / 2
    far = torch.tensor([65519.996, 65520.0, 1e9, 2.0**-25, 2.0**-26])
    values = torch.cat([halves, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), far, -far])[None]
    out = torch.full(values.shape, torch.nan, dtype=torch.float16)
    rounded = njit(round_all)
    rounded(values.numpy(), stored(out))
    assert torch.equal(out, values.half())
    back = torch.full(values.shape, torch.nan)
    rounded(stored(out), back.numpy())
    assert torch.equal(back, out.float())
