"""The gated activation between an MLP's two matmuls: silu(gate) * up (SwiGLU) or gelu(gate) * up (GeGLU).

silu(x) = x / (1 + exp(-x)). gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715
x^3), which is the approximation by Hendrycks and Gimpel (2016).
"""

import torch

from engine.kernels.launch import tl, triton
from engine.models.config import Activation

BLOCK = 2048  # of one row: two 16-byte loads of gate and of up per thread at 4 warps
TWICE_SQRT_2_BY_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def gated_activation_kernel(
    gate_up, out, gate_up_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        power = TWICE_SQRT_2_BY_PI * (gate + 0.044715 * gate * gate * gate)
    else:
        power = gate
    result = gate / (1.0 + tl.exp(-power)) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
    """gate_up [T, 2 I], the gate's columns first -> out [T, I]. Rows may be strided, columns not. Computed in float32,
    rounded once.
    """
    num_rows, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    gated_activation_kernel[grid](
        gate_up, out, gate_up.stride(0), out.stride(0),
        WIDTH=width, BLOCK=block, GELU=activation == "gelu_tanh", num_warps=4,
    )  # fmt: skip
