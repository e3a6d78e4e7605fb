"""How close an interpreted kernel must come to the reference, and outputs that show what was not written."""

import torch

# bf16: the interpreter cuts float32 off where a GPU rounds, so each pass through bf16 costs up to 2^-7, and a rotation
# mixes two.
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-5, torch.bfloat16: 4e-2}
DTYPES = [torch.float16, torch.float32, torch.bfloat16]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def row_strided(x: torch.Tensor) -> torch.Tensor:
    """The same rows inside wider ones, NaN between them."""
    wide = poisoned(x.shape[0], x[:1].numel() + 24, dtype=x.dtype)
    wide[:, : x[:1].numel()] = x.flatten(1)
    return wide[:, : x[:1].numel()].unflatten(1, x.shape[1:]) if x.dim() > 2 else wide[:, : x.shape[1]]


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Element by element, relative to the value, or to the largest of the reference times a tenth where the value is
    smaller.
    """
    assert ours.dtype == reference.dtype and ours.shape == reference.shape
    if reference.numel():
        a, b = ours.double(), reference.double()
        scale = b.abs().clamp_min(b.abs().max().item() / 10)
        error = ((a - b).abs() / scale).max().item()
        assert error < TOLERANCE[ours.dtype], f"relative error {error:.2e}"  # NaN fails too
