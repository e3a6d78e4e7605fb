import pytest
import torch

from engine.kernels import reference
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from tests.engine.kernels.compare import DTYPES, assert_close, poisoned, row_strided

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("hidden", [64, 576, 4096])
def test_norm(hidden: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_rows, hidden, dtype=dtype), torch.randn(hidden, dtype=dtype)
    out, expected = poisoned(num_rows, hidden, dtype=dtype), poisoned(num_rows, hidden, dtype=dtype)
    rms_norm(x, weight, EPS, out)
    reference.rms_norm(x, weight, EPS, expected)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", [torch.float32, None])
def test_add_changes_the_stream_in_place(stream: torch.dtype | None, dtype: torch.dtype) -> None:
    h, delta, weight = (
        torch.randn(3, 576, dtype=stream or dtype),
        torch.randn(3, 576, dtype=dtype),
        torch.randn(576, dtype=dtype),
    )
    h_expected, out, expected = h.clone(), poisoned(3, 576, dtype=dtype), poisoned(3, 576, dtype=dtype)
    add_rms_norm(h, delta, weight, EPS, out)
    reference.add_rms_norm(h_expected, delta, weight, EPS, expected)
    assert_close(h, h_expected)
    assert_close(out, expected)


def test_strided_rows_and_nothing_beside_them() -> None:
    dtype = torch.float16
    rows, more, weight = torch.randn(3, 96, dtype=dtype), torch.randn(3, 96, dtype=dtype), torch.randn(96, dtype=dtype)
    h, delta, out = row_strided(rows), row_strided(more), row_strided(poisoned(3, 96, dtype=dtype))
    expected_h, expected = rows.clone(), poisoned(3, 96, dtype=dtype)
    add_rms_norm(h, delta, weight, EPS, out)
    reference.add_rms_norm(expected_h, more, weight, EPS, expected)
    assert_close(h, expected_h)
    assert_close(out, expected)
    for tensor in (h, out):
        assert torch.as_strided(tensor, (3, 24), (120, 1), 96).isnan().all()


def test_a_row_of_zeros_stays_zero() -> None:
    out = poisoned(1, 64, dtype=torch.float16)
    rms_norm(torch.zeros(1, 64, dtype=torch.float16), torch.ones(64, dtype=torch.float16), EPS, out)
    assert out.eq(0).all()
