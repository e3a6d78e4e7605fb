"""The records of a replayed load, and how the command line shows them."""

import json
from pathlib import Path

from engine.scheduler.replay import pretty, replay

TRACES = Path(__file__).parents[2] / "data" / "scheduler"


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


def test_requests_that_arrive_in_one_step_are_ordered_by_their_place_in_the_list() -> None:
    """Among requests of equal priority the latest in the list waits and is evicted, whatever its name.

    Prompts have 7 tokens and blocks 4, and 6 blocks are usable: three requests run with 2 blocks each. Token 8 fits,
    but token 9 needs a third block, so in step 2 one request has to go for the other two.
    """
    names = ["c", "a", "b", "z", "d"]
    requests = [
        {
            "id": name,
            "arrival_step": 0,
            "prompt": [{"seed": seed, "len": 7}],
            "max_tokens": 4,
            "priority": 1,
            "gen_seed": seed,
        }
        for seed, name in enumerate(names)
    ]
    limits = {"block_size": 4, "num_blocks": 7, "max_num_batched_tokens": 64, "max_num_seqs": 3, "max_model_len": 32}
    records = replay({**limits, "policy": "priority", "requests": requests})
    assert [record.get("sched") for record in records[:3]] == [
        [["c", 7], ["a", 7], ["b", 7]],
        [["c", 1], ["a", 1], ["b", 1]],
        [["c", 1], ["a", 1]],
    ]
    assert (records[0]["waiting"], records[2]["preempted"], records[2]["waiting"]) == (
        ["z", "d"],
        ["b"],
        ["b", "z", "d"],
    )
    assert [name for record in records for name in record.get("finished", [])] == names
