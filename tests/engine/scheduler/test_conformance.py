"""The scheduler takes every decision of the recorded loads, step for step. tests/data/scheduler/README.md says what
the fields mean.
"""

import json
from pathlib import Path

import pytest

from engine.scheduler.replay import replay

TRACES = sorted((Path(__file__).parents[2] / "data" / "scheduler").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_same_decisions_as_recorded(path: Path) -> None:
    recorded = json.loads(path.read_text())
    for ours, theirs in zip(replay(recorded["trace"]), recorded["oracle"]["steps"], strict=True):
        assert ours == theirs


def test_all_traces_are_here() -> None:
    assert len(TRACES) == 24
