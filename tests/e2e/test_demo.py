"""The demo answers its prompts and leaves nothing behind. It is the first command that a newcomer runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.leftovers import none_left

ROOT = Path(__file__).parents[2]


def test_the_demo_answers_eight_prompts_and_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with none_left():
        command = [sys.executable, "-m", "twopass", "demo", "--timings"]
        command += ["--model", str(demo_model), "--json", str(out)]
        dead_proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        environment = {**os.environ, "COLUMNS": "100", **dead_proxy}
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    facts = json.loads(out.read_text())
    assert len(facts["requests"]) == 8
    assert max(request["prompt_tokens"] for request in facts["requests"]) > 600
    for request in facts["requests"]:
        assert request["text"]
        assert request["completion_tokens"] > 1
        stages = request["timing"]["stages"]
        assert {"router_queue", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step"} <= set(stages), (
            request["name"]
        )
        assert sum(stages.values()) == pytest.approx(request["timing"]["total_s"], rel=0.01)
        assert 0 < request["ttft_s"] < request["timing"]["total_s"] + 1
    prefill, decode = facts["engines"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert decode["bytes_moved"] > 0
    assert decode["gb_per_s"] > 0
    assert any(len(step) > 1 for step in decode["num_scheduled_tokens"] + prefill["num_scheduled_tokens"])
    for title in ("Requests (times in ms)", "TTFT", "Engines"):
        assert title in result.stdout
    rows = [line.split()[:-4] for line in result.stdout.partition("Timings")[2].splitlines()]
    phases = [" ".join(row) for row in rows]
    for phase in ("command Ray", "router tokenizer", "prefill-0 weights", "decode-0 kernels", "decode-0 first peer"):
        assert phase in phases
    assert phases.index("command first token") > phases.index("command greetings")
    assert "command stop" in phases
