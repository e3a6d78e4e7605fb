"""What the command line shows of a replayed load."""

import json
from pathlib import Path

from engine.replay import pretty, replay

TRACES = Path(__file__).parent.parent / "data" / "scheduler"


def test_people_see_what_is_left_and_who_had_to_go() -> None:
    trace = json.loads((TRACES / "t36_multi_victim_fcfs.json").read_text())["trace"]
    records = replay(trace)
    text = pretty(trace, records)
    evicted = sum(len(record.get("preempted", [])) for record in records)
    assert evicted > 0
    assert text.count("is evicted: a running request found no free block, and this is the newest") == evicted
    assert text.startswith("step 0: ")
    assert text.count(" is complete") == len(trace["requests"])


def test_steps_without_requests_are_idle() -> None:
    trace = json.loads((TRACES / "t01_single.json").read_text())["trace"]
    trace["requests"][0]["arrival_step"] = 2
    records = replay(trace)
    assert records[:2] == [{"t": 0, "idle": 1}, {"t": 1, "idle": 1}]
    assert pretty(trace, records).splitlines()[0] == "step 0: idle"


def test_the_same_load_gives_the_same_decisions() -> None:
    trace = json.loads((TRACES / "t27_spec_vary_pressure.json").read_text())["trace"]
    assert replay(trace) == replay(trace)
