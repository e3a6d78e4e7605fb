"""Measures the head, `x @ lm_head.T`, at 8B's shape: float32 logits from weights of 16 bits, as the engine asks cuBLAS
for them, beside logits rounded to 16 bits. Compares both with a product in float64.
"""

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.kernel_errors import relative_error
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import Setting
from bench.gpu.timing import Stopwatch, measure_floors
from engine.models.decoder import float32_logits

LIMIT = 1e-4
"""Limit of a row's relative error. Sums of 4096 products in float32 err by some 1e-6 of it, results rounded to bfloat16
by 2e-3.
"""


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    watch = Stopwatch(setting)
    floors = measure_floors(setting, watch)
    hidden, vocab_size = setting.size((4096, 128256), (64, 500))
    dtype = setting.dtypes[0]
    lm_head = torch.empty(vocab_size, hidden, dtype=dtype, device=setting.device).normal_(0.0, hidden**-0.5)
    exact = lm_head.double().t()
    rows: list[tuple[Cell, ...]] = []
    for num_rows in setting.size((1, 8, 64, 256), (3,)):
        x = torch.randn(num_rows, hidden, device=setting.device).to(dtype)
        wide, narrow = float32_logits(x, lm_head), torch.nn.functional.linear(x, lm_head)
        expected = x.double() @ exact
        error = relative_error(wide, expected)
        seconds = watch.device_s(partial(float32_logits, x, lm_head))
        narrow_s = watch.device_s(partial(torch.nn.functional.linear, x, lm_head))
        least_s = floors.least_s(x.nbytes + lm_head.nbytes + wide.nbytes, 2 * num_rows * hidden * vocab_size)
        times = seconds * 1e6, narrow_s * 1e6, least_s * 1e6, 100 * least_s / seconds
        rows.append((num_rows, *times, error, relative_error(narrow, expected), LIMIT))
        if wide.dtype != torch.float32 or not error < LIMIT:
            yield Problem(f"{num_rows} rows: {wide.dtype} logits with an error of {error:.2e}")
    columns = (
        Column("rows"),
        Column("float32 logits", "us", measured=True),
        Column("16-bit logits", "us", measured=True),
        Column("floor", "us", measured=True),
        Column("floor / float32", "%", measured=True),
        Column("error, float32"),
        Column("error, 16 bits"),
        Column("limit of float32"),
    )
    yield Table(f"head of {vocab_size} x {hidden}, {str(dtype).removeprefix('torch.')}", columns, rows)
    yield Note("error: of a row, length of the difference from a float64 product over its length; the largest of all")
