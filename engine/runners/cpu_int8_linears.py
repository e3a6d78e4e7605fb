"""int8 linears in the form that this machine computes fastest: our own kernel, and from how many rows on its panels are
widened for torch. Measured and kept as those of bf16 (cpu_linears.py). Where numba is not installed, or the inputs are
no whole groups, torch widens the weights.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engine.models.config import INT8_GROUP as GROUP
from engine.models.decoder import Decoder, Linear
from engine.models.quantized import Int8Linear, Int8Weight
from engine.runners.cpu_linears import (
    COLD_BYTES,
    HAS_NUMBA,
    MOST_COPIES,
    NEVER,
    ROWS,
    Shape,
    chosen,
    fastest_calls,
    one_thread,
)
from jit.loops_compile import one_compiles

_SOURCES = tuple(
    str(Path(__file__).with_name(name))
    for name in ("cpu_int8_linears.py", "cpu_int8_matmul.py", "cpu_int8_simd.py", "cpu_matmul.py", "cpu_simd.py")
)


def fit_int8_linears(model: Decoder, num_threads: int) -> None:
    """Gives each int8 linear of the model the form that was chosen for its shape, unless it has one already. Measures,
    up to 3 s, where no choice was kept. Compiles the kernels, or finds them compiled.
    """
    linears = [
        (linear, linear.weight)
        for layer in model.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        if isinstance(linear, Int8Linear) and linear.weight is not None and fits_panels(linear.weight)
    ]
    if not linears or not HAS_NUMBA:
        return
    from engine.runners.cpu_int8_matmul import panel_bytes
    from engine.runners.cpu_matmul import huge_pieces

    shapes = sorted({_shape(weight) for _, weight in linears})
    with one_compiles(_SOURCES):
        choices = chosen(shapes, partial(measure_shape, model.dtype), _SOURCES, model.dtype)
        for widened_from in {0 if choice.widened_from < NEVER else NEVER for choice in choices.values()}:
            _compile(model.dtype, widened_from)
    places = huge_pieces([panel_bytes(*_shape(weight)) for _, weight in linears])
    for (linear, weight), place in zip(linears, places, strict=True):
        linear.fit(partial(make_linear, model.dtype, choices[_shape(weight)].widened_from, num_threads, place))


def fits_panels(weight: Int8Weight) -> bool:
    return weight.values.shape[1] % GROUP == 0


def make_linear(
    dtype: torch.dtype,
    widened_from: int,
    num_threads: int,
    place: torch.Tensor | None,
    weight: Int8Weight,
    bias: torch.Tensor | None,
) -> Linear:
    """`x @ dequantize(weight).T + bias` in a model of `dtype`, by panels, in `place` if that is given."""
    from engine.runners.cpu_int8_matmul import Int8PanelLinear, pack

    return Int8PanelLinear(pack(weight, place), bias, len(weight.values), dtype, num_threads, widened_from)


def measure_shape(dtype: torch.dtype, shape: Shape) -> dict[str, Sequence[float]]:
    """Seconds of the kernel, and of torch over widened panels, by ROWS on one thread, for weights of this shape that
    are not in the cache.
    """
    num_out, num_in = shape
    copies = max(1, min(MOST_COPIES, COLD_BYTES // (num_out * num_in)))
    weight = _some_weight(num_out, num_in)
    forms = {"panels": NEVER, "widened": 0}
    with one_thread():
        linears = {
            name: [make_linear(dtype, widened_from, 1, None, weight, None) for _ in range(copies)]
            for name, widened_from in forms.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in linears}
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_in).to(dtype)
            calls = {name: [partial(linear, x) for linear in same] for name, same in linears.items()}
            for name, least in fastest_calls(calls, time.thread_time).items():
                seconds[name].append(least)
    return dict(seconds)


def _compile(dtype: torch.dtype, widened_from: int) -> None:
    """So that the first step does not."""
    make_linear(dtype, widened_from, 1, None, _some_weight(1, GROUP), None)(torch.zeros(1, GROUP, dtype=dtype))


def _some_weight(num_out: int, num_in: int) -> Int8Weight:
    values = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    return Int8Weight(values, torch.ones(num_out, num_in // GROUP, dtype=torch.float16))


def _shape(weight: Int8Weight) -> Shape:
    num_out, num_in = weight.values.shape
    return num_out, num_in
