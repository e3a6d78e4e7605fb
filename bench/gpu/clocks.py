"""Clocks, power, temperature and what slows a GPU down, as `nvidia-smi` tells them."""

import subprocess
from collections.abc import Iterator

from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting

ASK_S = 20.0
COLUMNS = {
    "clocks.sm": Column("SM clock", "MHz", measured=True),
    "clocks.max.sm": Column("SM maximum", "MHz", measured=True),
    "clocks.mem": Column("memory clock", "MHz", measured=True),
    "clocks.max.mem": Column("memory maximum", "MHz", measured=True),
    "power.draw": Column("power", "W", measured=True),
    "power.limit": Column("limit", "W", measured=True),
    "temperature.gpu": Column("temperature", "C", measured=True),
    "persistence_mode": Column("persistence mode", "on or off", measured=True),
}
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The bits of the reasons why clocks are below their maximum (nvml.h, nvmlClocksEventReason). The second is the name
that older drivers know.
"""
REASON = Column("reasons to be slower", "bits", measured=True)

Reading = list[Cell] | str
"""A value for each column and for the reasons; or why there are none."""


def read(gpu: str, setting: Setting) -> Reading:
    """Reads a GPU by the UUID of it."""
    if setting.rehearsal:
        return [None] * (len(COLUMNS) + 1)
    values = _ask(gpu, ",".join(COLUMNS))
    if isinstance(values, str):
        return values
    reasons: list[Cell] = ["unknown"]
    for name in REASONS:
        if isinstance(answer := _ask(gpu, name), list):
            reasons = answer
            break
    return values + reasons


def _ask(gpu: str, fields: str) -> Reading:
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    if done.returncode:
        return f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()}"
    return [_value(text.strip()) for text in done.stdout.strip().split(",")]


def _value(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def compared(before: list[Reading], after: list[Reading]) -> Iterator[Item]:
    """Yields one table of all GPUs before and after a section, or a note that says why there is none."""
    readings = [("before", gpu, one) for gpu, one in enumerate(before)]
    readings += [("after", gpu, one) for gpu, one in enumerate(after)]
    rows: list[tuple[Cell, ...]] = [(when, gpu, *one) for when, gpu, one in readings if not isinstance(one, str)]
    if rows:
        columns = (Column("when"), Column("GPU"), *COLUMNS.values(), REASON)
        yield Table("clocks and power", columns, rows)
    for why in dict.fromkeys(one for *_, one in readings if isinstance(one, str)):
        yield Note(f"clocks and power are unknown: {why}")
