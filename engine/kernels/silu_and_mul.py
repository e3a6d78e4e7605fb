"""The gated activation between a Llama MLP's two matmuls: silu(gate) * up, where silu(x) = x / (1 + exp(-x))."""

import torch

from engine.kernels.launch import tl, triton

BLOCK = 2048  # of one row: two 16-byte loads of gate and of up per thread at 4 warps


@triton.jit
def silu_and_mul_kernel(gate_up, out, gate_up_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up [T, 2 I], the gate's columns first -> out [T, I]. Rows may be strided, columns not. Computed in float32,
    rounded once.
    """
    num_rows, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), out.stride(0), WIDTH=width, BLOCK=block, num_warps=4)
