"""Metrics of a real deployment, split and colocated. They equal what was sent, and every expression of the shipped
files finds a series in Prometheus.
"""

import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import from_tree
from cluster.serve import Deployment
from engine.runners.arithmetic_model import expected_tokens
from tests.deploy.prometheus import ALERT, dashboard_expressions, program, rules, running
from tests.e2e.leftovers import none_left
from tests.hang import HANG_S
from twopass import Client, InvalidRequest

BLOCK_SIZE, BLOCK_BYTES = 16, 16 * 16
BUDGET = 128
NUM_DECODE_TOKENS = 40 * BLOCK_SIZE
"""Tokens that the decode pool's blocks hold, too few for two long answers at once."""
LONG = ([3, 1, 4] * 5, [2, 7, 1] * 5)
"""Two prompts that share nothing."""
NUM_LONG = 500
"""Tokens of each long answer."""

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]
"""Values by the metric's name, without its prefix, and by its labels."""


class Scraped:
    """The difference between two scrapes."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        """How much the sum over all series with these labels has grown."""
        wanted, before = labels.items(), self._before.get(name, {})
        return sum(value - before.get(key, 0.0) for key, value in self._after[name].items() if wanted <= set(key))


def scrape(deployment: Deployment) -> Samples:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{deployment.ports.metrics_port}/metrics", timeout=HANG_S
    ) as response:
        text = response.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("twopass_"), {})[frozenset(sample.labels.items())] = sample.value
    return found


def await_final_status(deployment: Deployment) -> None:
    """Waits until every engine has sent a status that it wrote after this call began."""
    first = {load.address: load.status.seq if load.status else 0 for load in deployment.loads()}
    while not all(load.status and load.status.seq > first[load.address] + 1 for load in deployment.loads()):
        deployment.watch(0.02)


@pytest.fixture(scope="module", params=[1, 0], ids=["disaggregated", "colocated"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    pool = {"max_model_len": 1024, "max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
    tree = {
        "runner": "arithmetic",
        "prefill": {**pool, "num_blocks": 129, "replicas": request.param},
        "decode": {**pool, "num_blocks": NUM_DECODE_TOKENS // BLOCK_SIZE + 1},
        "router": {"grpc_port": 0, "metrics_port": 0, "status_interval_s": 0.2},
    }
    with none_left(), Deployment(from_tree(tree), print) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(f"127.0.0.1:{deployment.ports.grpc_port}", timeout_s=HANG_S) as client:
        yield client


def test_every_number_equals_what_was_sent(deployment: Deployment, client: Client) -> None:
    """Sends one prompt of 100 tokens three times in a row, one whose answer is a single token, and three that are
    refused.
    """
    split = bool(deployment.config.prefill.replicas)
    prompt, num_tokens, times = [7] * 100, 20, 3
    before = scrape(deployment)
    for _ in range(times):
        answer = client.generate_text(prompt_token_ids=prompt, max_tokens=num_tokens)
        assert answer.token_ids == expected_tokens(prompt, num_tokens)
        await_final_status(deployment)  # decode has freed its blocks, so the next request finds them in its cache
    client.generate_text(prompt_token_ids=[9] * 40, max_tokens=1)
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            client.generate_text(prompt_token_ids=[32_000], max_tokens=4)
    await_final_status(deployment)
    got = Scraped(before, scrape(deployment))
    assert_requests_counted(got, split, times, num_tokens)
    assert_steps_counted(got, split, times, num_tokens)
    assert got("request_stage_seconds_sum") == pytest.approx(got("e2e_request_latency_seconds_sum"), rel=0.05)
    assert got("queue_oldest_seconds") == got("requests_running") == got("requests_in_flight") == 0


def assert_requests_counted(got: Scraped, split: bool, times: int, num_tokens: int) -> None:
    """What the router counts: `times` answers of `num_tokens` tokens, one of a single token, and three refusals."""
    assert got("requests_accepted_total") == times + 1
    assert got("requests_rejected_total", reason="invalid") == got("requests_rejected_total") == 3
    assert got("requests_ended_total", reason="length") == got("requests_ended_total") == times + 1
    assert got("accepted_prompt_tokens_total") == times * 100 + 40
    assert got("delivered_tokens_total") == got("generated_tokens_total") == times * num_tokens + 1
    assert got("requests_by_path_total", path="disaggregated" if split else "colocated") == (
        times if split else times + 1
    )
    assert got("requests_by_path_total", path="prefill_only") == (1 if split else 0)
    assert got("time_to_first_token_seconds_count") == got("e2e_request_latency_seconds_count") == times + 1
    assert got("inter_token_latency_seconds_count") == times * (num_tokens - 1)


def assert_steps_counted(got: Scraped, split: bool, times: int, num_tokens: int) -> None:
    """What engines count: prefix hits, computed and transferred tokens, and nothing that went wrong."""
    num_hit = (times - 1) * 96  # six of the prompt's seven blocks are full
    computing = "prefill" if split else "decode"
    assert got("prompt_tokens_total", pool=computing, source="computed") == times * 100 + 40 - num_hit
    assert got("prompt_tokens_total", pool=computing, source="cached") == num_hit
    assert got("prefix_hit_tokens_total", pool=computing) == num_hit
    assert got("prefix_query_tokens_total", pool=computing) == times * 100 + 40
    assert got("step_tokens_sum", pool=computing) >= times * 100 + 40 - num_hit
    if split:
        assert got("prompt_tokens_total", pool="decode", source="transferred") == times * 100 - num_hit
        assert got("transfers_total", transport="shared_memory") == times
        assert got("transfer_bytes_total", transport="shared_memory") == (7 + (times - 1) * 1) * BLOCK_BYTES
        assert got("leases_ended_total", outcome="consumed") == got("leases_ended_total") == times
        assert got("step_tokens_sum", pool="decode") == times * (num_tokens - 1)
    else:
        assert got("transfers_total") == got("transfer_bytes_total") == 0
        assert got("step_tokens_sum") == times * 100 + 40 - num_hit + times * (num_tokens - 1)
    assert got("step_budget_tokens_total") == BUDGET * got("step_seconds_count") == BUDGET * got("step_tokens_count")
    for name in (
        "preemptions",
        "recomputed_tokens",
        "request_retries",
        "transfer_failures",
        "transfer_expiries",
        "padding_tokens",
        "kernel_compilations",
    ):
        assert got(f"{name}_total") == 0, name


def test_what_is_counted_is_what_clients_were_told_and_a_request_is_one_answer(
    deployment: Deployment, client: Client
) -> None:
    before = scrape(deployment)
    prompt, num_tokens = [5] * 30, 6
    last = expected_tokens(prompt, num_tokens)[-1]
    stopped = client.generate_text(prompt_token_ids=prompt, max_tokens=num_tokens, stop=f"<{last}>")
    assert (stopped.token_ids, stopped.finish_reason) == (expected_tokens(prompt, num_tokens), "stop")
    answers = client.generate_texts(prompt_token_ids=prompt, max_tokens=num_tokens, temperature=1.0, n=3)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    with pytest.raises(InvalidRequest):
        client.generate_texts(prompt_token_ids=[32_000], max_tokens=4, temperature=1.0, n=3)
    await_final_status(deployment)  # so that the next test does not count these steps
    got = Scraped(before, scrape(deployment))
    assert got("requests_accepted_total") == got("requests_ended_total") == got("requests_by_path_total") == 4
    assert (got("requests_ended_total", reason="stop"), got("requests_ended_total", reason="length")) == (1, 3)
    assert got("requests_rejected_total", reason="invalid") == got("requests_rejected_total") == 3
    assert got("e2e_request_latency_seconds_count") == got("time_to_first_token_seconds_count") == 4


def test_two_answers_too_long_for_the_pool_preempt_once(deployment: Deployment, client: Client) -> None:
    """The second answer is preempted when the pool is full, and finds no room before the first has ended. Its stages
    include that wait.
    """
    before = scrape(deployment)

    def ask(prompt: list[int]) -> tuple[list[int], float]:
        started_at = time.perf_counter()
        answer = client.generate_text(prompt_token_ids=prompt, max_tokens=NUM_LONG)
        return answer.token_ids, time.perf_counter() - started_at

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask, LONG))
    await_final_status(deployment)
    got = Scraped(before, scrape(deployment))
    assert [token_ids for token_ids, _ in answers] == [expected_tokens(prompt, NUM_LONG) for prompt in LONG]
    assert got("preemptions_total", mode="recompute", pool="decode") == got("preemptions_total") == 1
    assert got("recomputed_tokens_total") > 0
    split = bool(deployment.config.prefill.replicas)
    num_prompt = sum(len(prompt) for prompt in LONG)
    num_computed = 2 * (NUM_LONG - 1) + got("recomputed_tokens_total") + (0 if split else num_prompt)
    assert got("step_tokens_sum", pool="decode") == num_computed
    assert got("delivered_tokens_total") == got("generated_tokens_total") == 2 * NUM_LONG
    assert got("inter_token_latency_seconds_count") == 2 * (NUM_LONG - 1)
    seconds = sum(seconds for _, seconds in answers)
    assert got("request_stage_seconds_sum") == pytest.approx(got("e2e_request_latency_seconds_sum"), rel=0.05)
    assert got("e2e_request_latency_seconds_sum") <= seconds


def test_prometheus_finds_a_series_for_every_expression(deployment: Deployment, client: Client, tmp_path: Path) -> None:
    """Sends small requests until each expression of dashboard, rules and alerts (less thresholds) has had a value."""
    program("prometheus")
    expressions = dashboard_expressions()
    for rule in rules():
        match = re.match(ALERT, rule["expr"]) if "alert" in rule else None
        expressions.append((rule.get("alert") or rule["record"], match[1] if match else rule["expr"]))
        if "record" in rule:
            expressions.append((rule["record"], rule["record"]))
    if not deployment.config.prefill.replicas:  # a colocated engine transfers and leases nothing
        expressions = [
            (name, text)
            for name, text in expressions
            if not re.search(r"transfer|leases_ended|disaggregated_share.* and ", text)
        ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(tmp_path, f"127.0.0.1:{deployment.ports.metrics_port}", port) as prometheus:
        until = time.monotonic() + HANG_S
        while not prometheus.query('up{job="twopass"} == 1'):
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            deployment.watch(0.1)
        while expressions := [
            (name, expression) for name, expression in expressions if not prometheus.query(expression)
        ]:
            assert time.monotonic() < until, expressions
            client.generate_text(prompt_token_ids=[11] * 40, max_tokens=8)
            deployment.watch(0.1)
        assert prometheus.query('count(ALERTS{alertstate="firing"})') == []
