import pytest
import torch

from engine.kernels import reference
from engine.kernels.gated_activation import BLOCK, gated_activation
from engine.models.config import Activation
from tests.engine.kernels.compare import DTYPES, assert_close, poisoned, row_strided


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("width", [64, 1536, BLOCK + 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_times_up(activation: Activation, width: int, num_rows: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype)
    out, expected = poisoned(num_rows, width, dtype=dtype), poisoned(num_rows, width, dtype=dtype)
    gated_activation(gate_up, out, activation)
    reference.gated_activation(gate_up, expected, activation)
    assert_close(out, expected)


def test_strided_rows_and_nothing_beside_them() -> None:
    gate_up = torch.randn(3, 192, dtype=torch.float16)
    out, expected = row_strided(poisoned(3, 96, dtype=torch.float16)), poisoned(3, 96, dtype=torch.float16)
    gated_activation(row_strided(gate_up), out, "silu")
    reference.gated_activation(gate_up, expected, "silu")
    assert_close(out, expected)
    assert torch.as_strided(out, (3, 24), (120, 1), 96).isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_far_gates_saturate(activation: Activation) -> None:
    gate_up, out = torch.tensor([[-1000.0, 1000.0, 2.0, 2.0]]), poisoned(1, 2, dtype=torch.float32)
    gated_activation(gate_up, out, activation)
    assert out.tolist() == [[0.0, 2000.0]]
