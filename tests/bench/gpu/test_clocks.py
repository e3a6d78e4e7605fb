"""Tests that clocks and power are read from whatever `nvidia-smi` there is, and that a missing one is told."""

from pathlib import Path

import pytest

from bench.gpu.clocks import COLUMNS, compared, read
from bench.gpu.report import Note, Table
from bench.gpu.setting import Setting

SETTING = Setting(rehearsal=False, seed=1, gpus=("GPU-a",))
OLD = """#!/bin/sh
[ "$1 $2" = "-i GPU-a" ] || { echo "No devices were found"; exit 6; }
case "$3" in
*event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
*throttle_reasons*) echo "0x0000000000000004";;
*) echo "1980, 1980, 2619, 2619, 691.23, 700.00, 61, Enabled";;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is found as `nvidia-smi`. It does not exist yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path / "nvidia-smi"


def test_a_gpu_is_read_by_its_uuid_also_with_an_older_driver(tool: Path) -> None:
    tool.write_text(OLD)
    tool.chmod(0o755)
    reading = read("GPU-a", SETTING)
    assert reading == [1980.0, 1980.0, 2619.0, 2619.0, 691.23, 700.0, 61.0, "Enabled", "0x0000000000000004"]
    (table,) = compared([reading], [reading])
    assert isinstance(table, Table)
    assert [row[:2] for row in table.rows] == [("before", 0), ("after", 0)]
    assert {len(row) for row in table.rows} == {len(table.columns)} == {len(COLUMNS) + 3}
    other = read("GPU-b", SETTING)
    assert isinstance(other, str) and "No devices were found" in other


def test_a_machine_without_the_tool_says_so(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tool.parent))
    (note,) = compared([read("GPU-a", SETTING)], [read("GPU-a", SETTING)])
    assert isinstance(note, Note)
    assert note.text.startswith("clocks and power are unknown: nvidia-smi") and "No such file" in note.text
