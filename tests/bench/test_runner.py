"""The runner's benchmark measures every size, and prints floors that follow from the machine's own speed."""

import json

import pytest
import torch

pytest.importorskip("numba")

from bench import attention_cpu, machine
from bench import runner as bench
from engine.models.config import Dtype
from engine.models.decoder import Decoder
from engine.models.loading import TORCH_DTYPES, build_model
from tests.engine.tiny_llama import TINY, random_tensors


def tiny(dtype: Dtype) -> Decoder:
    return build_model(TINY, dtype, random_tensors(TINY, TORCH_DTYPES[dtype]).__getitem__)


def test_figures_of_a_short_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "MATMUL", 64)
    models = tiny("bfloat16"), tiny("bfloat16"), tiny("float32")
    figures = bench.run(*models, num_threads=1, rounds_s=0.0)
    assert [row.rows for row in figures.linears] == [1, 8, 32, 64, 512]
    assert [step.step for step in figures.steps] == [
        "decode 1 x 256", "decode 8 x 256", "decode 32 x 256", "prompt of 512"
    ]  # fmt: skip
    for row in figures.linears:
        assert min(row.ours_ms, row.torch_bfloat16_ms, row.torch_float32_ms, row.floor_ms) > 0
    assert all(step.ms > 0 and step.floor_ms > 0 for step in figures.steps)
    assert len(bench.table(figures).splitlines()) == 3 + 5 + 2 + 4

    monkeypatch.setattr(bench, "demo_model_dir", lambda say: None)
    monkeypatch.setattr(bench, "load_model", lambda model_dir, dtype: tiny(dtype))
    monkeypatch.setattr(bench, "run", lambda ours, bfloat16, float32, num_threads: figures)
    monkeypatch.setattr(attention_cpu, "rows", lambda **shape: [attention_cpu.Row("decode", 1, 2.0, 4.0, 0.5)])
    monkeypatch.setattr("sys.argv", ["runner", "--json", "--threads", str(torch.get_num_threads())])
    bench.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["linears"][0]["rows"] == 1 and printed["attention"][0]["share"] == 0.5


def test_a_floor_is_the_longer_of_reading_and_multiplying() -> None:
    some = machine.Machine(threads=1, read_gb_s=10.0, float32_gflop_s=100.0)
    assert some.floor_s(1_000_000, 1) == pytest.approx(2e6 / 10e9)
    assert some.floor_s(1_000_000, 50) == pytest.approx(1e8 / 100e9)


def test_only_the_fastest_repeat_of_each_part_counts() -> None:
    now, seconds = [0.0], iter([5.0, 1.0, 2.0, 9.0])

    def part() -> None:
        now[0] += next(seconds)

    fastest = machine.Fastest([part, part], clock=lambda: now[0])
    machine.take_turns([fastest], 0.0)
    fastest.repeat()
    assert fastest.seconds == 2.0 + 1.0
