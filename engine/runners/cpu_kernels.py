"""Compiled CPU kernels over rows: norms and gated activations. Attention has a file of its own, cpu_attention.py.

Arrays in the model's dtype are `Stored`; all sums are float32.
"""

import numpy as np
from numba import prange
from numba.extending import register_jitable

from engine.runners import cpu_elements
from engine.runners.cpu_elements import LOG2E, Stored, exp2, load, store
from jit.kernel_cache import compiled
from protocol.arrays import Float32

SOURCES = (__file__, cpu_elements.__file__)

SQRT_2_BY_PI = np.float32(0.7978845608028654)


@register_jitable
def norm_row(h: Stored, row: int, weight: Float32, eps: np.float32, out: Stored) -> None:
    hidden = h.shape[1]
    total = np.float32(0.0)
    for i in range(hidden):
        total += load(h[row, i]) * load(h[row, i])
    scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
    for i in range(hidden):
        store(out, row, i, load(h[row, i]) * scale * weight[i])


@compiled(SOURCES)
def norm(h: Stored, weight: Float32, eps: np.float32, out: Stored) -> None:
    """RMS norm of every row of h [T, hidden], which is float32 or in the dtype of `out`."""
    for row in prange(h.shape[0]):
        norm_row(h, row, weight, eps, out)


@register_jitable
def norm_heads_row(x: Stored, row: int, weight: Float32, eps: np.float32) -> None:
    num_heads, head_dim = weight.shape
    for head in range(num_heads):
        column = head * head_dim
        total = np.float32(0.0)
        for d in range(head_dim):
            value = load(x[row, column + d])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + eps)
        for d in range(head_dim):
            store(x, row, column + d, load(x[row, column + d]) * scale * weight[head, d])


@compiled(SOURCES)
def norm_heads(x: Stored, weight: Float32, eps: np.float32) -> None:
    """RMS norm, in place, of each of the leading heads of every row; `weight` [heads, head_dim], x [T, at least heads *
    head_dim].
    """
    if x.shape[0] < 8:
        for row in range(x.shape[0]):
            norm_heads_row(x, row, weight, eps)
    else:
        for row in prange(x.shape[0]):
            norm_heads_row(x, row, weight, eps)


@register_jitable
def add_norm_row(h: Float32, row: int, delta: Stored, weight: Float32, eps: np.float32, out: Stored) -> None:
    for i in range(h.shape[1]):
        h[row, i] += load(delta[row, i])
    norm_row(h, row, weight, eps, out)


@compiled(SOURCES)
def add_norm(h: Float32, delta: Stored, weight: Float32, eps: np.float32, out: Stored) -> None:
    """h += delta, then its norm. Few rows are not worth waking threads for."""
    if h.shape[0] < 16:
        for row in range(h.shape[0]):
            add_norm_row(h, row, delta, weight, eps, out)
    else:
        for row in prange(h.shape[0]):
            add_norm_row(h, row, delta, weight, eps, out)


@register_jitable(inline="always")
def exp_of_minus(x: np.float32) -> np.float32:
    """exp(-x), 2 ** 127 where that would be larger."""
    power: np.float32 = exp2(min(-x * LOG2E, np.float32(127.0)))
    return power


@register_jitable
def silu_mul_row(gate_up: Stored, row: int, out: Stored) -> None:
    inner = out.shape[1]
    for i in range(inner):
        gate, up = load(gate_up[row, i]), load(gate_up[row, inner + i])
        store(out, row, i, up * gate / (np.float32(1.0) + exp_of_minus(gate)))


@compiled(SOURCES)
def silu_mul(gate_up: Stored, out: Stored) -> None:
    """out [T, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:], where silu(x) = x / (1 + exp(-x))."""
    if out.shape[0] < 8:
        for row in range(out.shape[0]):
            silu_mul_row(gate_up, row, out)
    else:
        for row in prange(out.shape[0]):
            silu_mul_row(gate_up, row, out)


@register_jitable
def gelu_tanh_mul_row(gate_up: Stored, row: int, out: Stored) -> None:
    inner = out.shape[1]
    for i in range(inner):
        gate, up = load(gate_up[row, i]), load(gate_up[row, inner + i])
        bent = SQRT_2_BY_PI * (gate + np.float32(0.044715) * gate * gate * gate)
        store(out, row, i, up * gate / (np.float32(1.0) + exp_of_minus(np.float32(2.0) * bent)))


@compiled(SOURCES)
def gelu_tanh_mul(gate_up: Stored, out: Stored) -> None:
    """out [T, inner] = gelu(gate_up[:, :inner]) * gate_up[:, inner:].

    Here gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is the
    approximation by Hendrycks and Gimpel (2016).
    """
    if out.shape[0] < 8:
        for row in range(out.shape[0]):
            gelu_tanh_mul_row(gate_up, row, out)
    else:
        for row in prange(out.shape[0]):
            gelu_tanh_mul_row(gate_up, row, out)
