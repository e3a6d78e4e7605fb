"""Runs workloads on a configuration in virtual time, as `twopass simulate` does."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, from_tree
from cluster.simulate import StepCosts, scenario, simulate, workload
from protocol.errors import ConfigError

COSTS = StepCosts(step_s=0.01, decode_s=0.0, prompt_token_s=0.001, block_s=0.0, wire_s=0.001)


def config(**router: object) -> ClusterConfig:
    pool = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return from_tree({"runner": "arithmetic", "prefill": pool, "decode": pool, "router": {"grpc_port": 0, **router}})


def test_one_request_takes_what_its_steps_cost(tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"at_s": 0.0, "prompt_tokens": 100, "output_tokens": 11}\n')
    result = simulate(scenario(config(), workload(str(load)), COSTS, num_blocks={"prefill": 64, "decode": 64}))
    # It takes two chunks of 64 and 36 tokens, then 10 steps of one token, and a message in each direction.
    assert result["finished"] == 1 and result["engine_steps"] == 12
    assert result["ttft_s"]["p50"] == pytest.approx(2 * 0.01 + 100 * 0.001 + 2 * 0.001, abs=0.002)
    assert result["inter_token_s"]["p50"] == pytest.approx(0.01, abs=0.001)


def test_the_same_workload_is_the_same_result_and_load_costs_latency() -> None:
    def run(rate: float) -> dict[str, float]:
        requests = workload(f"poisson:requests=40,rate={rate},prompt=60,output=20")
        return simulate(scenario(config(), requests, COSTS, num_blocks={"prefill": 64, "decode": 64}))

    slow, fast = run(1.0), run(20.0)
    assert slow == run(1.0)
    assert slow["finished"] == fast["finished"] == 40
    assert fast["output_tokens_per_s"] > slow["output_tokens_per_s"]
    assert fast["ttft_s"]["p99"] > slow["ttft_s"]["p99"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("poisson:rat=3", "rat"),
        ("poisson:rate=x", "rate"),
        ("poisson:rate=0", "rate"),
        ("no/such/file", "no/such/file"),
    ],
)
def test_a_bad_workload_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        workload(text)


def test_a_file_that_is_no_workload_is_named(tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"at": 1}\n')
    with pytest.raises(ConfigError, match="at_s"):
        workload(str(load))
