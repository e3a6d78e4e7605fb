"""Rehearses the script for machines with a GPU without one, and runs it with sections that end badly."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu.answers import compare
from bench.gpu.report import Column, Note, Problem, Section, Table
from bench.gpu.setting import GPU_TRANSPORTS
from engine.runner import Batch, StepOutput
from protocol.messages import SamplingParams, TokenLogprobs
from router.admission import ClientRequest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "gpu_check.py"
ABSENT = ("ray", "grpc", "pydantic", "numba", "llvmlite", "yaml", "google", "prometheus_client", "tokenizers")
"""Modules that a machine with a GPU may lack. The script needs only torch, Triton, numpy and safetensors."""
WITHOUT = f"""
import importlib.metadata as metadata, runpy, sys
distribution = metadata.distribution
def other_name(name):  # Triton has come from another distribution
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return distribution(name)
metadata.distribution = other_name
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NAMES = [
    "environment",
    "preflight",
    "kernel errors",
    "tokens",
    "pair",
    "pair, two GPUs",
    *(f"exporter death, {kind}" for kind in GPU_TRANSPORTS),
    *(f"exporter death, {kind}, two GPUs" for kind in GPU_TRANSPORTS),
    "head",
    "kernel times",
    "step times",
    "scheduler share",
    "pool size",
    "transfer",
    "transfer, two GPUs",
    "decode beside pulls",
    "decode beside pulls, two GPUs",
    "layouts",
]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a rehearsal, with its output under "text"."""
    file = tmp_path_factory.mktemp("rehearsal") / "report.json"
    command = [sys.executable, "-c", WITHOUT, str(SCRIPT), "--rehearse", "--seed", "5", "--json", str(file)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(file.read_text())
    assert done.returncode == 0, (
        f"{[section for section in report['sections'] if section['status'] != 'ok']}\n{done.stderr[-4000:]}"
    )
    return report | {"text": done.stdout}


def test_every_section_is_walked_without_a_gpu(rehearsal: dict[str, Any]) -> None:
    assert [section["name"] for section in rehearsal["sections"]] == NAMES
    assert {section["status"] for section in rehearsal["sections"]} == {"ok"}
    assert all(section["tables"] and not section["problems"] for section in rehearsal["sections"])


def test_the_page_describes_every_section_and_names_one_for_each_open_question() -> None:
    page = (ROOT / "docs" / "gpu" / "README.md").read_text()
    described, asked = page.split("## What it does")[1].split("## Reading it")
    names = {
        line.split(" | ")[0].removeprefix("| ").replace("KIND", kind)
        for line in described.splitlines()
        if line.startswith("| ") and not line.startswith("| section")
        for kind in GPU_TRANSPORTS
    }
    assert names == set(NAMES)
    questions = [line.split(" | ") for line in asked.splitlines() if line.startswith("| ") and "?" in line]
    assert len(questions) >= 10
    for _, sections, _ in questions:
        assert set(sections.split("; ")) <= names


def test_the_report_says_where_it_comes_from(rehearsal: dict[str, Any]) -> None:
    assert rehearsal["rehearsal"] is True
    assert (rehearsal["seed"], rehearsal["gpus"]) == (5, 2)
    assert {"git_commit", "started_at", "machine"} <= rehearsal.keys()
    assert {"card", "driver", "python", "torch", "cuda", "triton"} <= rehearsal["machine"].keys()
    assert rehearsal["machine"]["card"] is None
    assert rehearsal["machine"]["triton"], "told by the module, whatever brought it"


def section(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(section for section in report["sections"] if section["name"] == name)


def found(section: dict[str, Any], title: str) -> list[list[Any]]:
    """Rows of a table."""
    return next(table["rows"] for table in section["tables"] if table["title"] == title)


@pytest.mark.parametrize("place", ["", ", two GPUs"])
def test_a_dead_exporters_memory_is_free_once_nobody_maps_it(rehearsal: dict[str, Any], place: str) -> None:
    title = "free memory of the dead exporter's GPU"
    mapped = section(rehearsal, f"exporter death, cuda_ipc{place}")
    assert [row[0] for row in found(mapped, title)] == ["when the importer closed the peer"]
    staged = section(rehearsal, f"exporter death, host_staged{place}")
    assert [row[0] for row in found(staged, title)] == ["at the exporter's death"]


@pytest.mark.parametrize("kind", GPU_TRANSPORTS)
def test_a_pull_is_under_way_when_its_exporter_dies(rehearsal: dict[str, Any], kind: str) -> None:
    """Nothing in the section depends on how fast a pull or a kill is."""
    told = found(section(rehearsal, f"exporter death, {kind}"), f"{kind}: the pull")
    assert told[:2] == [["under way when the exporter was gone", "True"], ["ended by itself", "True"]]


def test_the_two_processes_of_a_transfer_see_different_gpus(rehearsal: dict[str, Any]) -> None:
    """Each fake device is the one that its process's environment names, so what lies between them is known."""
    (same,) = (note for note in section(rehearsal, "transfer")["notes"] if "transport cuda_ipc" in note)
    (apart,) = (note for note in section(rehearsal, "transfer, two GPUs")["notes"] if "transport cuda_ipc" in note)
    assert same.endswith("same GPU")
    assert "peer access yes" in apart


def test_clocks_and_power_are_read_around_what_is_timed(rehearsal: dict[str, Any]) -> None:
    timed = {
        part["name"]: len(found(part, "clocks and power"))
        for part in rehearsal["sections"]
        if any(table["title"] == "clocks and power" for table in part["tables"])
    }
    alone = ["environment", "head", "kernel times", "step times", "scheduler share", "layouts"]
    moving = ["transfer", "decode beside pulls"]
    assert timed == dict.fromkeys([*alone, *moving], 2) | {f"{name}, two GPUs": 4 for name in moving}


def test_a_rehearsal_reports_no_figures(rehearsal: dict[str, Any]) -> None:
    """Measured figures are null in the JSON and "rehearsal" in the text. Counts and comparisons are reported."""
    tables = {table["title"]: table for section in rehearsal["sections"] for table in section["tables"]}
    num_measured = 0
    for table in tables.values():
        assert all({"name", "unit", "measured"} == column.keys() for column in table["columns"])
        for row in table["rows"]:
            assert len(row) == len(table["columns"])
            measured = [value for value, column in zip(row, table["columns"], strict=True) if column["measured"]]
            assert set(measured) <= {None}, table["title"]
            num_measured += len(measured)
    assert num_measured > 50
    assert "rehearsal" in rehearsal["text"]
    assert all(
        0 <= error < limit
        for title in ("rows: errors", "attention: errors")
        for *_, error, limit in tables[title]["rows"]
    )


def test_each_figure_of_time_or_speed_has_a_unit(rehearsal: dict[str, Any]) -> None:
    columns = [
        column for section in rehearsal["sections"] for table in section["tables"] for column in table["columns"]
    ]
    without = {column["name"] for column in columns if column["measured"] and not column["unit"]}
    assert without == {"rate", "ratio", "KV blocks"}  # "rate" has its unit in each row


def test_nothing_stays_in_shared_memory(rehearsal: dict[str, Any]) -> None:
    assert list(Path("/dev/shm").glob("twopass-gpu-check-*")) == []


def test_without_a_gpu_the_script_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
        assert done.returncode == 2
        assert "no GPU here" in done.stderr
        assert "--rehearse" in done.stderr
    else:
        pytest.skip("this machine has an NVIDIA driver")


def test_sections_that_end_badly_harm_no_other() -> None:
    command = [sys.executable, "-m", "tests.deploy.broken_sections"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    raises, dies, hangs, problem, cannot, missing, measures, sees, sees_all, lacks, late = json.loads(done.stdout)
    assert (raises["status"], raises["why"], raises["notes"]) == ("failed", "KeyError: 'what went wrong'", ["before"])
    assert (dies["status"], dies["why"], dies["notes"]) == ("failed", "its process ended with exit code -9", ["before"])
    assert (hangs["status"], hangs["why"]) == ("failed", "stopped after 1 s")
    assert not _runs(int(hangs["notes"][0])), "what a section started must end with it"
    assert (problem["status"], problem["why"], problem["notes"]) == ("failed", "two and two are five", ["after"])
    assert (cannot["status"], cannot["why"]) == ("not run", "no such device")
    assert missing["status"] == "failed"
    assert missing["why"].startswith("ModuleNotFoundError")
    assert measures["status"] == "ok"
    assert measures["tables"][0]["rows"] == [["copy", 3.5, None]]
    assert measures["text"].splitlines()[-1].split() == ["copy", "3.5", "-"]
    assert sees["notes"] == ["this process and one of its own see GPU-a and GPU-b, float32 products are highest"]
    assert sees_all["notes"] == [
        "this process and one of its own see GPU-a,GPU-b and GPU-b, float32 products are highest"
    ]
    assert (lacks["status"], lacks["why"]) == ("not run", "it takes 3 GPUs, this run is shown 2")
    assert (late["status"], late["seconds"]) == ("not run", 0.0)
    assert "used up" in late["why"]


def _runs(pid: int) -> bool:
    """Whether a process is neither gone nor a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_table_keeps_figures_out_of_a_rehearsal() -> None:
    table = Table("t", (Column("what"), Column("time", "us", measured=True)), [("a", 12.345678), ("bb", None)])
    real, rehearsed = Section("s", rehearsal=False), Section("s", rehearsal=True)
    for section in (real, rehearsed):
        section.take(table)
    assert real.as_text().splitlines()[2:] == ["   t", "   what  time [us]", "   a         12.35", "   bb            -"]
    assert rehearsed.as_text().splitlines()[-1] == "   bb    rehearsal"
    assert rehearsed.as_json()["tables"][0]["rows"] == [["a", None], ["bb", None]]


class CloseCalls:
    """A runner for which token 1 is always the likeliest, token 2 a little less likely and token 3 much less likely."""

    def execute(self, batch: Batch) -> StepOutput:
        told = TokenLogprobs(-0.7, (1, 2, 3), (-0.7, -0.7005, -4.0))
        return StepOutput(token_ids=np.ones((1, 1), np.int32), counts=np.ones(1, np.int32), logprobs={0: [told]})


def test_greedy_answers_may_differ_at_close_calls_only() -> None:
    asked = [
        ClientRequest(
            request_id="g", prompt_token_ids=np.arange(3, dtype=np.int32), max_tokens=3, sampling=SamplingParams()
        )
    ]
    expected = {"g": [5, 1, 6]}
    assert compare("x", asked, expected, {"g": [5, 1, 6]}, CloseCalls()) == []
    for token, kind in ((2, Note), (3, Problem), (4, Problem)):
        (item,) = compare("x", asked, expected, {"g": [5, token, 9]}, CloseCalls())
        assert type(item) is kind
        assert "token 1" in item.text
    (short,) = compare("x", asked, expected, {"g": [5, 1]}, CloseCalls())
    assert short == Problem("x, g: 2 tokens, expected 3")


def test_one_sampled_answer_may_differ_and_no_second() -> None:
    sampling = SamplingParams(temperature=0.8, seed=1)
    asked = [
        ClientRequest(request_id=name, prompt_token_ids=np.arange(3, dtype=np.int32), max_tokens=2, sampling=sampling)
        for name in "ab"
    ]
    expected = {"a": [1, 2], "b": [3, 4]}
    assert [type(item) for item in compare("x", asked, expected, expected | {"a": [1, 9]}, CloseCalls())] == [Note]
    items = compare("x", asked, expected, {"a": [1, 9], "b": [9, 4]}, CloseCalls())
    assert [type(item) for item in items] == [Note, Note, Problem]
