"""Runs one prefill and one decode engine with the arithmetic runner under a real Ray, and asks through the client."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import httpx
import pytest

from cluster.config import from_tree
from cluster.serve import Deployment
from engine.runners.arithmetic_model import expected_logprobs, expected_tokens
from tests.e2e.leftovers import descendants, none_left
from tests.e2e.watched import Running, await_idle
from tests.hang import HANG_S
from twopass import Client, InvalidRequest, TokenLogprobs

MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    pool = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 256, "max_num_seqs": 32, "num_blocks": 2048}
    config = from_tree(
        {
            "runner": "arithmetic",
            "prefill": pool,
            "decode": pool,
            "router": {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "status_interval_s": 0.2},
        }
    )
    events: SimpleQueue[str] = SimpleQueue()
    with none_left(), Deployment(config, events.put) as deployment:
        running = Running(deployment, events)
        yield running
        running.close()


def test_the_answer_is_exact_and_was_disaggregated(running: Running) -> None:
    prompt = list(range(3, 600))
    answer = running.client.generate_text(prompt_token_ids=prompt, max_tokens=40)
    assert answer.token_ids == expected_tokens(prompt, 40)
    assert (answer.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        "length",
        len(prompt),
        40,
    )
    assert {"prefill", "transfer", "decode"} <= set(answer.timing.stages)
    assert sum(answer.timing.stages.values()) == pytest.approx(answer.timing.total_s, rel=0.01)


def test_openais_dialect_gives_the_same_tokens(running: Running) -> None:
    prompt = list(range(3, 300))
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0.0}
    answer = httpx.post(
        f"http://127.0.0.1:{running.deployment.ports.http_port}/v1/completions",
        json=body, timeout=HANG_S, trust_env=False,
    ).json()  # fmt: skip
    (choice,), usage = answer["choices"], answer["usage"]
    assert choice["text"] == "".join(f"<{token_id}> " for token_id in expected_tokens(prompt, 20))
    assert (choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]) == ("length", len(prompt), 20)


def test_engines_and_the_router_are_as_urgent_as_their_supervisor(running: Running) -> None:
    """Ray by itself would start them at nice 15, below every other process of the machine."""
    workers = {pid: command for pid, command in descendants(os.getpid()).items() if "Actor" in command}
    assert len(workers) == 3
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_prompt_seen_before_comes_from_the_prefix_cache(running: Running) -> None:
    prompt = [7] * 100
    first, second = (running.client.generate_text(prompt_token_ids=prompt, max_tokens=4) for _ in range(2))
    assert first.token_ids == second.token_ids == expected_tokens(prompt, 4)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 96)


def test_sampled_answers_are_exact_and_every_token_has_its_logprobs(running: Running) -> None:
    prompt = list(range(100, 300))
    answers = running.client.generate_texts(
        prompt_token_ids=prompt, max_tokens=20, n=3, temperature=0.7, seed=41, logprobs=2
    )
    assert [answer.index for answer in answers] == [0, 1, 2]
    for seed, answer in enumerate(answers, 41):
        assert answer.token_ids == expected_tokens(prompt, 20, seed=seed)
        expected = [expected_logprobs(token_id, 2) for token_id in answer.token_ids]
        assert answer.logprobs == [
            TokenLogprobs(e.chosen, dict(zip(e.top_token_ids, e.top, strict=True))) for e in expected
        ]
        assert answer.usage.completion_tokens == 60
    loads = running.client.loads()  # in the order in which the engines have sent their `Hello`
    assert sorted(load.role for load in loads.replicas) == ["decode", "prefill"]
    assert running.client.server_info().ready


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {"max_tokens": 4}, "prompt"),
        ([1] * MAX_MODEL_LEN, {"max_tokens": 4}, "prompt"),
        ([32_000], {"max_tokens": 4}, "token_ids[0]"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"max_tokens": 4, "n": 0}, "n"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    running: Running, prompt: list[int], options: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        running.client.generate_text(prompt_token_ids=prompt, **options)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_nothing_leaks_after_200_mixed_requests_with_cancels(running: Running) -> None:
    """An idle engine checks that all its blocks are free, and dies if not. A death would be an event here."""
    while not running.events.empty():
        running.events.get()
    seeds = range(200)
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda seed: _one(running.client, random.Random(seed)), seeds))
    await_idle(running.deployment)
    assert running.events.empty()
    for load in running.deployment.loads():
        assert load.in_flight == 0
        assert load.status is not None
        assert load.status.num_free_blocks == load.hello.num_blocks - 1
        assert load.status.num_waiting + load.status.num_running + load.status.num_leases + load.status.num_pulls == 0


def _one(client: Client, draw: random.Random) -> None:
    """Sends one request. A third of them is cancelled after some tokens."""
    prompt = [draw.randrange(50) for _ in range(draw.choice((1, 15, 16, 17, 100, 400)))]
    num_tokens = draw.randrange(1, 60)
    num_read = draw.randrange(num_tokens) if draw.random() < 1 / 3 else num_tokens
    got: list[int] = []
    with client.generate(prompt_token_ids=prompt, max_tokens=num_tokens) as stream:
        for chunk in stream:
            got += chunk.token_ids
            if num_read < num_tokens and len(got) >= num_read:
                break
    assert got == expected_tokens(prompt, len(got))
    assert len(got) == num_tokens or num_read < num_tokens


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_an_engine_may_die_in_the_middle_of_an_answer(running: Running, victim: str) -> None:
    """The client sees neither a gap nor a repeat, and the engine comes back under a higher epoch."""
    prompt, num_tokens = [5, 6, 7] * 40, 1500
    old = running.deployment.actor(victim)
    got: list[int] = []
    with running.client.generate(prompt_token_ids=prompt, max_tokens=num_tokens) as stream:
        for chunk in stream:
            if len(got) < 50 <= len(got) + len(chunk.token_ids):
                old.kill()
            got += chunk.token_ids
    assert got == expected_tokens(prompt, num_tokens)
    while running.events.get(timeout=HANG_S) != f"{victim} is back":
        continue
    assert running.deployment.actor(victim).address.epoch > old.address.epoch
    assert running.client.generate_text(prompt_token_ids=[1, 2], max_tokens=3).token_ids == expected_tokens([1, 2], 3)
