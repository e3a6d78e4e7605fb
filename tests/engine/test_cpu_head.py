"""The compiled head: float32 logits of bf16 weights, for every number of rows and every torn end of the vocabulary."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.models.decoder import float32_logits
from engine.runners import cpu_head
from jit.kernel_cache import one_compiles


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 97, 130, 1024])
@pytest.mark.parametrize("num_bins", [1, 3])
@pytest.mark.parametrize(("pairs", "wide"), [(True, True), (False, True), (False, False)])
def test_dots_of_every_row_in_float32(vocab_size: int, num_bins: int, pairs: bool, wide: bool) -> None:
    if pairs and not cpu_head.PAIRS:
        pytest.skip("this CPU has no instructions for bf16")
    hidden = 96
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randn(vocab_size, hidden, generator=generator).bfloat16()
    head = cpu_head.make_head(hidden, pairs=pairs, wide=wide)
    for num_rows in (1, 2, 3, 4, 5, 9):
        x = torch.randn(num_rows, hidden, generator=generator).bfloat16()
        out = np.full((num_rows, vocab_size), np.nan, np.float32)
        with one_compiles(cpu_head.SOURCES):
            head(x.view(torch.uint16).numpy(), weights.view(torch.uint16).numpy(), out, num_bins)
        exact = x.double() @ weights.double().T
        torch.testing.assert_close(torch.from_numpy(out).double(), exact, rtol=0, atol=2e-5)
        torch.testing.assert_close(float32_logits(x, weights).double(), exact, rtol=0, atol=2e-5)
