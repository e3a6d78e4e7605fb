"""Weights in 8 bits: of a linear alone, and widened again as they are multiplied. All sums stay float32.

Each output's weights are in groups of GROUP inputs, as in GGUF's Q8_0: int8 values and one float16 scale, symmetric,
to the nearest. One scale for a whole output would spare 1/17 of the bytes, but it is as large as the output's largest
weight demands: in the demo model all errors are then 1.5 times as large, those of the weights and those of the logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.models.config import INT8_GROUP as GROUP
from engine.models.decoder import Linear

LARGEST = 127
WIDENED_ELEMENTS = 1 << 20
"""About as many weights are widened at a time, which leaves them in the cache."""


class Int8Weight(NamedTuple):
    """A weight is `values * scales` of its group."""

    values: torch.Tensor
    """int8 [out, in], -127 to 127."""
    scales: torch.Tensor
    """float16 [out, ceil(in / GROUP)]."""


def quantize(weight: torch.Tensor) -> Int8Weight:
    """[out, in] in any dtype; no weight is then further off than half its scale. Weights beyond 8e6, for which float16
    has no scale, become infinite.
    """
    num_out, num_in = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -num_in % GROUP)).view(num_out, -1, GROUP)
    largest = groups.abs().amax(2)
    scales = (largest / LARGEST).half()
    # where float16 has few digits left, the nearest scale may be too small
    too_small = scales.float() * (LARGEST + 0.5) < largest
    scales = torch.where(too_small, (scales.view(torch.int16) + 1).view(torch.float16), scales)
    values = (groups / scales.float().where(scales > 0, 1.0)[:, :, None]).round().clamp(-LARGEST, LARGEST)
    return Int8Weight(values.to(torch.int8).view(num_out, -1)[:, :num_in].contiguous(), scales)


def dequantize(weight: Int8Weight) -> torch.Tensor:
    """float32 [out, in]"""
    scales = weight.scales.float().repeat_interleave(GROUP, dim=1)
    return weight.values.float().mul_(scales[:, : weight.values.shape[1]])


class Int8Linear:
    """`x @ dequantize(weight).T + bias` by torch in float32, rounded to x's dtype, until a runner fits it to its
    hardware: then its weight is held only in the form that the runner gave it, and `weight` is None.
    """

    __slots__ = ("_compute", "bias", "weight")

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        self.weight: Int8Weight | None = weight
        self.bias = bias
        self._compute: Linear = widened_linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x)

    def fit(self, make: Callable[[Int8Weight, torch.Tensor | None], Linear]) -> None:
        """From here on it computes by what `make` makes of weight and bias. Only once."""
        assert self.weight is not None, "fitted before"
        self._compute = make(self.weight, self.bias)
        self.weight = None


def widened_linear(weight: Int8Weight, bias: torch.Tensor | None) -> Linear:
    """By torch alone: weights are widened to float32 a few outputs at a time."""
    step = max(1, WIDENED_ELEMENTS // weight.values.shape[1])
    pieces = [Int8Weight(*piece) for piece in zip(weight.values.split(step), weight.scales.split(step), strict=True)]

    def linear(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = torch.cat([torch.nn.functional.linear(wide, dequantize(piece)) for piece in pieces], dim=1)
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return linear
