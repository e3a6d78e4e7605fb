"""RMS norm over rows, alone or with the residual added first (Zhang and Sennrich, 2019): out = x / sqrt(mean(x^2) +
eps) * weight.
"""

import torch

from engine.kernels.launch import tl, triton


@triton.jit
def rms_norm_kernel(
    x, delta, weight, out, x_stride, delta_stride, out_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program, held in registers: x is read once, and written back (+ delta) where `delta` is given."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    source = x + row * x_stride + columns
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(x.dtype.element_ty)
        tl.store(source, stored, mask=inside)
        value = stored.to(tl.float32)  # the norm of what the next layer will read
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    result = value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """x [T, hidden] float32 or model dtype -> out [T, hidden] model dtype; weight [hidden]. Rows may be strided,
    columns not.
    """
    _launch(x, None, weight, eps, out)


def add_rms_norm(h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """h += delta in place, then out = norm of the new h. h [T, hidden] float32 or model dtype, delta and out [T,
    hidden] model dtype.
    """
    _launch(h, delta, weight, eps, out)


def _launch(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    num_rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    num_warps = min(16, max(1, block // 512))  # 16 elements a thread: two to four 16-byte loads in flight
    delta_stride = 0 if delta is None else delta.stride(0)
    rms_norm_kernel[(num_rows,)](
        x,
        delta,
        weight,
        out,
        x.stride(0),
        delta_stride,
        out.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=num_warps,
    )
