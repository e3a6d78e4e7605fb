"""The compiled head: float32 logits of 16-bit weights, for any number of rows and every torn end of the vocabulary."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.models.decoder import float32_logits
from engine.runners import cpu_head
from engine.runners.cpu_simd import Kind
from jit.kernel_cache import one_compiles

TYPES: dict[Kind, tuple[torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.uint16),
    "f16": (torch.float16, torch.int16),
}
"""And the integers that they are stored as."""


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 97, 130, 1024])
@pytest.mark.parametrize("num_bins", [1, 3])
@pytest.mark.parametrize(
    ("kind", "pairs", "wide"),
    [("bf16", True, True), ("bf16", False, True), ("bf16", False, False), ("f16", True, True), ("f16", False, False)],
)
def test_dots_of_every_row_in_float32(vocab_size: int, num_bins: int, kind: Kind, pairs: bool, wide: bool) -> None:
    if kind == "bf16" and pairs and not cpu_head.PAIRS:
        pytest.skip("this CPU has no instructions for bf16")
    hidden, dtype, bits = 96, *TYPES[kind]
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randn(vocab_size, hidden, generator=generator).to(dtype)
    head = cpu_head.make_head(hidden, kind, pairs=pairs, wide=wide)
    for num_rows in (1, 2, 3, 4, 5, 9):
        x = torch.randn(num_rows, hidden, generator=generator).to(dtype)
        out = np.full((num_rows, vocab_size), np.nan, np.float32)
        with one_compiles(cpu_head.SOURCES):
            head(x.view(bits).numpy(), weights.view(bits).numpy(), np.empty(x.shape, np.float32), out, num_bins)
        exact = x.double() @ weights.double().T
        torch.testing.assert_close(torch.from_numpy(out).double(), exact, rtol=0, atol=2e-5)
        torch.testing.assert_close(float32_logits(x, weights).double(), exact, rtol=0, atol=2e-5)
