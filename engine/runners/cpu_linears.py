"""bf16 linears in the form that this machine computes fastest, and the choice of it: measured once, then kept.

A weight is in memory once, in one of three layouts. Each has its kernels:

- panels: our own (cpu_matmul.py), or torch's float32 matmul over panels that are widened a few at a time.
- packed: oneDNN's, on CPUs whose bf16 instructions it knows.
- stored: torch's, on the weight as it is.

For every shape and several numbers of rows all of them are timed on weights that are not in the cache, on one thread
and by its CPU time: that is the same beside busy neighbours, where threads that wait for each other may take a hundred
times as long. A layout is as good as where it is worst: it is the one that at no number of rows is much slower than the
fastest of all. Float32 weights are left to torch, which always computes them in the same way.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from engine.models.decoder import Decoder, Linear, StoredLinear
from jit.cache_dir import cache_dir
from jit.kept_files import digest, keep, read_kept
from jit.loops_compile import one_compiles

Make = Callable[[torch.Tensor, torch.Tensor | None], Linear]
Shape = tuple[int, int]
"""(out, in)"""
Measure = Callable[[Shape], Mapping[str, Sequence[float]]]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""The numbers of rows that are measured."""
NEVER = 1 << 62
"""More rows than any step has."""
WORTH = 1.05
"""What is preferred may be slower by this factor."""
COLD_BYTES, MOST_COPIES = 1 << 26, 96
"""Weights that are measured in turn, so that no cache holds them; a model of small ones is in the cache, too."""
TURNS, LEAST_TURNS, TURNS_S = 40, 4, 0.005
"""Calls of each kernel: up to TURNS as long as they take less than TURNS_S in all, and LEAST_TURNS in any case."""
HOPELESS = 2.0
"""A kernel that was slower than another by this factor twice is not called again."""
WIDENED_ROWS = 4
"""From so many rows on, a float16 linear on a CPU without instructions for it is faster in float32."""
WIDENED_ELEMENTS = 2**20
"""float16 weights that are widened at a time, which leaves them in the cache."""

HAS_NUMBA = find_spec("numba") is not None
_SOURCES = (__file__, str(Path(__file__).with_name("cpu_matmul.py")), str(Path(__file__).with_name("cpu_simd.py")))

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    layout: str
    """panels, packed or stored"""
    widened_from: int = NEVER
    """From so many rows on, panels are widened for torch."""


def fit_linears(model: Decoder, num_threads: int) -> None:
    """Gives each stored bf16 linear of the model the form that was chosen for its shape, unless it has one already.
    Measures, up to 3 s, where no choice was kept. Compiles the kernels, or finds them compiled. float16 has one form.
    """
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        if isinstance(linear, StoredLinear) and linear.weight is not None
    ]
    if model.dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        for linear in linears:
            linear.fit(widened_linear)
    if model.dtype is not torch.bfloat16 or not linears:
        return
    shapes = sorted({_shape(linear) for linear in linears})
    with one_compiles(_SOURCES):
        choices = chosen(shapes, measure_shape)
        _compile(choices.values())
    places = _places([_shape(linear) for linear in linears if choices[_shape(linear)].layout == "panels"])
    for linear in linears:
        choice = choices[_shape(linear)]
        place = next(places) if choice.layout == "panels" else None
        linear.fit(partial(make_linear, choice, num_threads, place))


def _compile(choices: Iterable[Choice]) -> None:
    """The kernels that are called, so that the first step does not."""
    by_panels = [choice for choice in choices if choice.layout == "panels"]
    if not by_panels:
        return
    from engine.runners.cpu_matmul import PANEL, TERMS

    for widened_from in {0 if choice.widened_from < NEVER else NEVER for choice in by_panels} | {NEVER}:
        weight = torch.zeros(PANEL, TERMS, dtype=torch.bfloat16)
        make_linear(Choice("panels", widened_from), 1, None, weight, None)(weight)


def _places(shapes: Sequence[Shape]) -> Iterator[torch.Tensor]:
    """Memory for the panels of each."""
    if not shapes:
        return
    from engine.runners.cpu_matmul import huge_pieces, panel_bytes

    yield from huge_pieces([panel_bytes(*shape) for shape in shapes])


def make_linear(
    choice: Choice, num_threads: int, place: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
) -> Linear:
    """`x @ weight.T + bias` for a bf16 weight [out, in], which is copied where the layout is not its own: panels into
    `place` if that is given.
    """
    if choice.layout == "panels":
        from engine.runners.cpu_matmul import PanelLinear, pack

        return PanelLinear(pack(weight, place), bias, len(weight), num_threads, choice.widened_from)
    if choice.layout == "packed":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

        def packed_linear(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return y

        return packed_linear
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def widened_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A float16 linear on a CPU without instructions for it. torch's own product sums in float32 too, but multiplies
    many rows one at a time; those go through panels of weights that are widened to float32.
    """
    panels = weight.split(max(1, WIDENED_ELEMENTS // weight.shape[1]))

    def linear(x: torch.Tensor) -> torch.Tensor:
        if len(x) < WIDENED_ROWS:
            return torch.nn.functional.linear(x, weight, bias)
        wide = x.float()
        y = torch.cat([torch.nn.functional.linear(wide, panel.float()) for panel in panels], dim=1)
        return (y if bias is None else y + bias).half()

    return linear


def chosen(
    shapes: Sequence[Shape], measured: Measure, sources: Sequence[str] = _SOURCES, dtype: torch.dtype = torch.bfloat16
) -> dict[Shape, Choice]:
    """The choices for these shapes: those that were kept, else by what is `measured`, and then kept. What is wrong with
    the table makes a start some seconds longer, but never fails it. sources, dtype: of what is measured.
    """
    try:
        path = cache_dir() / "kernels" / f"linears-{table_key(shapes, sources, dtype)}.json"
    except OSError as error:
        _log.warning("choice of linears: %s; measured for this start alone", error)
        return {shape: choose(measured(shape)) for shape in shapes}
    try:
        if (kept := read_kept(path)) is not None:
            return {shape: Choice(*choice) for shape, choice in zip(shapes, json.loads(kept), strict=True)}
    except OSError as error:
        _log.warning("%s: cannot be read: %s; measured again", path, error.strerror)
    choices = {shape: choose(measured(shape)) for shape in shapes}
    _log.info("linears: %s", choices)
    try:
        keep(path, json.dumps(list(choices.values())).encode())
    except OSError as error:
        _log.warning("%s: cannot be written: %s; the next start measures again", path, error.strerror)
    return choices


def table_key(shapes: Sequence[Shape], sources: Sequence[str], dtype: torch.dtype) -> str:
    """Stands for all that a choice depends on, instructions that are masked off included."""
    facts = [_cpu_model(), _made_for(), torch.__version__, torch.backends.cpu.get_cpu_capability(), can_pack(), dtype]
    digests = b"".join(digest(Path(path).read_bytes()) for path in sources)
    return digest(f"{facts} {list(shapes)}".encode() + digests).hex()


def choose(seconds: Mapping[str, Sequence[float]]) -> Choice:
    """From the seconds of each kernel by ROWS: panels, widened, packed and stored, as far as there are any."""
    by_layout = {layout: seconds[layout] for layout in ("panels", "packed", "stored") if layout in seconds}
    first = len(ROWS)
    if "widened" in seconds:
        panels, widened = seconds["panels"], seconds["widened"]
        while first and widened[first - 1] * WORTH < panels[first - 1]:
            first -= 1
        by_layout["panels"] = [*panels[:first], *widened[first:]]
    fastest = [min(at_rows) for at_rows in zip(*seconds.values(), strict=True)]
    worst = {
        layout: max(own / least for own, least in zip(by_rows, fastest, strict=True))
        for layout, by_rows in by_layout.items()
    }
    layout = next(layout for layout in by_layout if worst[layout] <= WORTH * min(worst.values()))
    return Choice(layout, ROWS[first] if layout == "panels" and first < len(ROWS) else NEVER)


def measure_shape(shape: Shape) -> dict[str, list[float]]:
    """Seconds of each kernel by ROWS on one thread, for weights of this shape that are not in the cache."""
    num_out, num_in = shape
    copies = max(1, min(MOST_COPIES, COLD_BYTES // (2 * num_out * num_in)))
    some = torch.randn(1 << 16).bfloat16()
    weights = some.repeat(-(-copies * num_out * num_in // len(some)))[: copies * num_out * num_in]
    forms = {"stored": Choice("stored")}
    if can_pack():
        forms |= {"packed": Choice("packed")}
    if HAS_NUMBA and _fits_panels(num_in):
        forms |= {"panels": Choice("panels"), "widened": Choice("panels", 0)}
    with one_thread():
        linears = {
            name: [make_linear(choice, 1, None, weight, None) for weight in weights.view(copies, num_out, num_in)]
            for name, choice in forms.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in linears}
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_in).bfloat16()
            calls = {name: [partial(linear, x) for linear in same] for name, same in linears.items()}
            for name, least in fastest_calls(calls, time.thread_time).items():
                seconds[name].append(least)
    return seconds


@contextmanager
def one_thread() -> Iterator[None]:
    """Neither torch nor our own kernels use others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if HAS_NUMBA:
        import numba

        numba_before = numba.get_num_threads()
        numba.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if HAS_NUMBA:
            numba.set_num_threads(numba_before)


def fastest_calls(calls: Mapping[str, Sequence[Callable[[], object]]], clock: Callable[[], float]) -> dict[str, float]:
    """The seconds of each one's fastest call. They take turns, so that a busy neighbour slows all of them, and each
    goes through its own calls.
    """
    least, spent = dict.fromkeys(calls, math.inf), dict.fromkeys(calls, 0.0)
    for turn in range(TURNS):
        for name, own in calls.items():
            if turn >= 2 and least[name] > HOPELESS * min(least.values()):
                continue
            if turn >= LEAST_TURNS and spent[name] > TURNS_S:
                continue
            start = clock()
            own[turn % len(own)]()
            took = clock() - start
            least[name], spent[name] = min(least[name], took), spent[name] + took
    return least


def can_pack() -> bool:
    """Whether this torch and CPU run bf16 linears on weights packed for oneDNN."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _shape(linear: StoredLinear) -> Shape:
    assert linear.weight is not None
    num_out, num_in = linear.weight.shape
    return num_out, num_in


def _fits_panels(num_in: int) -> bool:
    from engine.runners.cpu_matmul import TERMS

    return num_in % TERMS == 0


def _made_for() -> str:
    """What our own kernels are compiled for."""
    if not HAS_NUMBA:
        return ""
    from engine.runners.cpu_matmul import MADE_FOR

    return MADE_FOR


def _cpu_model() -> str:
    """As Linux calls it; two kinds of CPU may have the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")
