"""The scheduler's benchmark runs and prints what it has measured."""

import json

import pytest

from bench import scheduler_time as bench


def test_figures_of_a_short_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = bench.run(num_steps=5, sizes=(8,))
    assert [figure["running"] for figure in short["decode"]] == [8]
    assert short["decode"][0]["tokens_per_step"] == 8
    assert short["mixed"]["preemptions"] == 0
    assert all(
        figure["schedule_us"] > 0 and figure["commit_us"] > 0
        for figure in (*short["decode"], short["mixed"], short["preemption"])
    )
    monkeypatch.setattr(bench, "run", lambda num_steps: short)
    monkeypatch.setattr("sys.argv", ["scheduler", "--json"])
    bench.main()
    assert json.loads(capsys.readouterr().out) == short
