"""bf16 linears: every kernel rounds a float32 sum once, whatever the shape; and the choice between them is kept."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from engine.models.decoder import StoredLinear
from engine.models.loading import build_model
from engine.runners import cpu_linears, cpu_matmul
from engine.runners.cpu_linears import (
    NEVER,
    ROWS,
    Choice,
    Shape,
    choose,
    chosen,
    fastest_calls,
    fit_linears,
    one_thread,
)
from engine.runners.cpu_matmul import BLOCK_ROWS, MOST_ROWS, PanelLinear, pack
from jit.kernel_cache import one_compiles
from tests.engine.test_kernel_cache import DAMAGES
from tests.engine.test_torch_runner_golden import AVX2_ONLY
from tests.engine.tiny_llama import TINY, random_tensors
from tests.hang import HANG_S

SHAPES = [(1, 32), (31, 96), (64, 256), (97, 288), (200, 544)]
NUM_ROWS = (*range(1, 15), 25, BLOCK_ROWS, BLOCK_ROWS + 3, MOST_ROWS + 2)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Several threads would only wait for each other; shares are made for as many as a kernel is told of."""
    with one_thread():
        yield


def check_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within half a unit in the last place of bf16, and what float32 sums may be off."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert out.dtype is torch.bfloat16 and out.shape == exact.shape
    assert bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6 * weight.shape[1]).all())


def check_kernels() -> None:
    """Every kernel of this CPU against float64."""
    generator = torch.Generator().manual_seed(3)
    forms = [Choice("stored"), Choice("panels"), Choice("panels", 0), Choice("panels", 5)]
    if cpu_linears.can_pack():
        forms.append(Choice("packed"))
    for num_out, num_in in SHAPES:
        weight, with_bias = (
            torch.randn(*shape, generator=generator).bfloat16() for shape in ((num_out, num_in), (num_out,))
        )
        for bias in (None, with_bias):
            for form in forms:
                linear = cpu_linears.make_linear(form, 2, None, weight, bias)
                for num_rows in NUM_ROWS if form == Choice("panels") else (1, 4, 5, 200):
                    x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
                    check_close(linear(x), x, weight, bias)


def test_every_kernel_rounds_once() -> None:
    with one_compiles(cpu_matmul.SOURCES):
        check_kernels()


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="this CPU knows no more than AVX2"
)
def test_every_kernel_rounds_once_on_a_cpu_that_knows_avx2_alone() -> None:
    command = [sys.executable, "-m", "tests.engine.test_cpu_linears"]
    ran = subprocess.run(
        command, env=os.environ | AVX2_ONLY, stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=True
    )
    assert ran.stdout.split() == ["AVX2", "False", "False"]


@pytest.mark.parametrize(("pairs", "wide"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_does_not_depend_on_those_beside_it(
    pairs: bool, wide: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pairs and not cpu_matmul.PAIRS:
        pytest.skip("this CPU has no instructions for bf16")
    weight, x = torch.randn(130, 544).bfloat16(), torch.randn(MOST_ROWS + 20, 544).bfloat16()
    linear = PanelLinear(pack(weight), None, 130, num_threads, NEVER)
    monkeypatch.setattr(linear, "_matmul", cpu_matmul.make_matmul(pairs=pairs, wide=wide))
    with one_compiles(cpu_matmul.SOURCES):
        together = linear(x)
    check_close(together, x, weight, None)
    for first, num_rows in (
        (0, 1),
        (1, 2),
        (5, 7),
        (9, 13),
        (0, BLOCK_ROWS + 1),
        (BLOCK_ROWS - 5, 25),
        (MOST_ROWS - 1, 2),
    ):
        assert torch.equal(linear(x[first : first + num_rows]), together[first : first + num_rows])


def test_values_that_bf16_has_no_others_for() -> None:
    """Ties go to the even neighbour; infinities stay what they are."""
    linear = PanelLinear(pack(torch.eye(32).bfloat16()), torch.zeros(32), 32, 1, NEVER)
    x = torch.zeros(1, 32).bfloat16()
    x[0, :4] = torch.tensor([1.0, -0.0, 3.0e38, -2.0])
    assert torch.equal(linear(x), x)
    tied = PanelLinear(pack(torch.ones(32, 32).bfloat16()), torch.full((32,), 2.0**-8), 32, 1, NEVER)
    x = torch.zeros(1, 32).bfloat16()
    x[0, 0] = 1.0
    assert tied(x).tolist() == [[1.0] * 32]
    x[0, 1] = 2.0**-7
    assert tied(x).tolist() == [[1.0 + 2.0**-6] * 32]


@pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 2), (1, 16), (130, 16), (200, 5)])
def test_more_threads_than_panels(num_rows: int, num_threads: int) -> None:
    weight, x = torch.randn(70, 96).bfloat16(), torch.randn(num_rows, 96).bfloat16()
    check_close(PanelLinear(pack(weight), None, 70, num_threads, NEVER)(x), x, weight, None)


def test_panels_in_given_memory() -> None:
    weight = torch.randn(70, 96).bfloat16()
    memory = cpu_matmul.huge_pages(cpu_matmul.panel_bytes(70, 96))
    panels = pack(weight, memory)
    assert torch.equal(panels, pack(weight)) and panels.data_ptr() == memory.data_ptr()


def test_what_panels_cannot_hold_is_left_to_torch() -> None:
    assert set(cpu_linears.measure_shape((40, 33))) <= {"stored", "packed"}


def test_a_fitted_model_holds_each_weight_once() -> None:
    weights = random_tensors(TINY, torch.bfloat16)
    model = build_model(TINY, "bfloat16", weights.__getitem__)
    linears = [linear for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    x = torch.randn(3, TINY.hidden_size).bfloat16()
    before = model.layers[0].qkv(x)
    for num_threads in (1, 2):  # the second runner finds them fitted
        fit_linears(model, num_threads)
        for linear in linears:
            assert isinstance(linear, StoredLinear) and linear.weight is None
    torch.testing.assert_close(model.layers[0].qkv(x), before, rtol=2**-7, atol=1e-3)
    exact = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    fit_linears(exact, 1)
    assert isinstance(exact.layers[0].o, StoredLinear) and exact.layers[0].o.weight is not None


FLAT = [1.0] * len(ROWS)


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ({"stored": FLAT}, Choice("stored")),
        ({"stored": FLAT, "packed": FLAT, "panels": FLAT, "widened": FLAT}, Choice("panels")),
        ({"stored": FLAT, "panels": [1.04] * 9}, Choice("panels")),
        ({"stored": FLAT, "panels": [1.06] * 9}, Choice("stored")),
        # ten times as fast at many rows outweighs twice as slow at few
        ({"packed": [2.0] * 5 + [0.1] * 4, "panels": FLAT}, Choice("packed")),
        ({"packed": [12.0] * 5 + [0.1] * 4, "panels": FLAT}, Choice("panels")),
        # widened where it is faster, and at all numbers of rows from there on
        ({"stored": [9.0] * 9, "panels": FLAT, "widened": [2.0] * 7 + [0.9] * 2}, Choice("panels", 128)),
        ({"stored": [9.0] * 9, "panels": FLAT, "widened": [2.0, 0.9, *[2.0] * 7]}, Choice("panels")),
        ({"stored": [0.5] * 9, "panels": FLAT, "widened": [0.5] * 9}, Choice("panels", 1)),
    ],
)
def test_the_choice(seconds: Mapping[str, Sequence[float]], choice: Choice) -> None:
    assert choose(seconds) == choice


class Clock:
    """Time passes only in calls, and for a busy neighbour."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, *seconds: float) -> Callable[[], object]:
        """Something that takes so long in its first, second ... turn, and as long as in the last from there on."""
        times = list(seconds)

        def run() -> None:
            self.called.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return run


def test_the_fastest_of_calls_in_turn() -> None:
    clock = Clock()
    calls = {
        "noisy": [clock.call("noisy", 3e-4, 3e-4, 9e-4, 1e-4, 9e-4)],
        "steady": [clock.call("steady", 2e-4)],
        "hopeless": [clock.call("hopeless", 0.5)],
    }
    least = fastest_calls(calls, clock)
    assert least == pytest.approx({"noisy": 1e-4, "steady": 2e-4, "hopeless": 0.5})
    assert clock.called[:6] == ["noisy", "steady", "hopeless"] * 2
    assert clock.called.count("hopeless") == 2
    assert clock.called.count("noisy") >= 4 and clock.called.count("steady") > 20


def test_calls_go_through_all_copies() -> None:
    clock = Clock()
    fastest_calls({"own": [clock.call(str(i), 1e-6) for i in range(3)]}, clock)
    assert clock.called[:4] == ["0", "1", "2", "0"]


def measured(shapes: list[Shape]) -> Callable[[Shape], Mapping[str, Sequence[float]]]:
    """A measurer that says what it is asked for."""

    def measure(shape: Shape) -> Mapping[str, Sequence[float]]:
        shapes.append(shape)
        return {"stored": FLAT, "panels": FLAT, "widened": [0.5 if shape[0] > 100 else 2.0] * 9}

    return measure


BOTH: list[Shape] = [(64, 32), (128, 32)]
CHOICES = {(64, 32): Choice("panels", NEVER), (128, 32): Choice("panels", 1)}


def asked() -> list[Shape]:
    """What is measured by one more start, which makes the right choices in any case."""
    shapes: list[Shape] = []
    assert chosen(BOTH, measured(shapes)) == CHOICES
    return shapes


def test_a_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    assert asked() == BOTH
    assert asked() == []
    monkeypatch.setattr(cpu_linears, "_cpu_model", lambda: "another CPU")
    assert asked() == BOTH, "another CPU has a table of its own"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_table_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    asked()
    (file,) = tmp_path.glob("kernels/linears-*")
    damage(file)
    assert asked() == BOTH
    if file.is_file():
        assert asked() == [], "and the table is good again"


def test_a_full_disk_keeps_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert asked() == BOTH
    assert asked() == BOTH
    assert not list(tmp_path.glob("kernels/*"))


def test_a_file_where_the_folder_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "file"))
    assert asked() == BOTH


if __name__ == "__main__":
    print(torch.backends.cpu.get_cpu_capability(), cpu_matmul.PAIRS, cpu_matmul.WIDE)
    with one_thread():
        check_kernels()
