"""Invariant I7: tokens are the same, split or colocated, in any pools, under any policy and budget. All tests together
must take less than 2 minutes.

The real model runs in float32 on the committed prompts, whose top-2 margins are all above 0.005, and must give the
tokens of an independent implementation. The other tests use the arithmetic model, whose tokens are exact.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models.loading as loading
from cluster.config import from_tree
from engine.runners.arithmetic_model import expected_tokens
from protocol.messages import SamplingParams
from router.policy import POLICIES
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir
from tests.local_deployment import LocalDeployment, asked

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())[
    "cases"
]
LONG = [token for case in CASES for token in case["prompt_ids"]] * 5
"""A prompt of 650 tokens."""
POOLS = {"1P1D": (1, 1), "colocated": (0, 1), "2P2D": (2, 2), "1P3D": (1, 3), "colocated x2": (0, 2)}
TABLE: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def one_table() -> Iterator[None]:
    yield
    print("\n" + "\n".join(["pools         budget  caching  prompts  tokens equal", *TABLE]))


@pytest.fixture(scope="module", autouse=True)
def weights_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_model", cache(loading.load_model))
        yield


def real(
    model: Path, pools: str, *, dtype: str = "float32", quantization: str = "none", **knobs: Any
) -> LocalDeployment:
    pool = {"max_model_len": 1024, "max_num_seqs": 8, "num_blocks": 160, **knobs}
    num_prefill, num_decode = POOLS[pools]
    tree = {
        "model": str(model),
        "dtype": dtype,
        "quantization": quantization,
        "prefill": {**pool, "replicas": num_prefill},
        "decode": {**pool, "replicas": num_decode},
    }
    return LocalDeployment(from_tree(tree))


@pytest.mark.parametrize(
    ("pools", "budget", "caching"),
    [*product(["1P1D"], [16, 8192], [True, False]), ("1P1D", 100, True), *product(["colocated"], [16, 8192], [True])],
)
def test_golden_tokens(demo_model: Path, pools: str, budget: int, caching: bool) -> None:
    with real(demo_model, pools, max_num_batched_tokens=budget, enable_prefix_caching=caching) as deployment:
        answers = deployment.answer(asked(case["name"], case["prompt_ids"], 48) for case in CASES)
    equal = {
        case["name"]: sum(a == b for a, b in zip(answers[case["name"]], case["greedy_ids"], strict=True))
        for case in CASES
    }
    TABLE.append(
        f"{pools:13} {budget:6}  {caching!s:7}  {len(equal):7}  {', '.join(f'{n}/48' for n in equal.values())}"
    )
    assert set(equal.values()) == {48}, equal


@pytest.mark.parametrize("pools", ["2P2D", "1P3D", "colocated x2"])
def test_golden_tokens_in_larger_pools(demo_model: Path, pools: str) -> None:
    with real(demo_model, pools, max_num_batched_tokens=64) as deployment:
        answers = deployment.answer(asked(case["name"], case["prompt_ids"], 48) for case in CASES)
    assert answers == {case["name"]: case["greedy_ids"] for case in CASES}


def test_a_long_prompt_is_answered_alike_split_and_colocated(demo_model: Path) -> None:
    answers = []
    for pools in ("1P1D", "colocated"):
        with real(demo_model, pools, max_num_batched_tokens=256) as deployment:
            answers.append(deployment.answer([asked("long", LONG, 24)])["long"])
    TABLE.append(
        f"1P1D = colocated, prompt of {len(LONG)} tokens: {sum(a == b for a, b in zip(*answers, strict=True))}/24"
    )
    assert answers[0] == answers[1]


def test_a_prompt_of_8000_tokens_is_answered_alike_split_and_colocated(tmp_path: Path) -> None:
    """Small random weights suffice: what counts are 500 blocks, a position next to the model's last one, and chunks of
    different sizes.
    """
    write_model_dir(tmp_path / "model", replace(TINY, max_position_embeddings=8192))
    draw, answers = random.Random(1), []
    prompt = [draw.randrange(TINY.vocab_size) for _ in range(8000)]
    for pools, budget in (("1P1D", 2048), ("colocated", 500)):
        with real(
            tmp_path / "model", pools, max_model_len=8192, num_blocks=520, max_num_batched_tokens=budget
        ) as deployment:
            answers.append(deployment.answer([asked("longest", prompt, 192)])["longest"])
    assert answers[0] == answers[1]


def test_a_float16_checkpoint_is_answered_alike_split_and_colocated(tmp_path: Path) -> None:
    """One request at a time, so that both compute the same steps: rounding moves no token."""
    tensors = random_tensors(TINY, torch.float16)
    write_model_dir(tmp_path / "model", tensors=tensors)
    draw, answers = random.Random(2), []
    prompts = [[draw.randrange(TINY.vocab_size) for _ in range(length)] for length in (3, 70, 200)]
    for pools in ("1P1D", "colocated"):
        with real(tmp_path / "model", pools, dtype="auto", max_num_batched_tokens=64) as deployment:
            answers.append([deployment.answer([asked(f"{len(prompt)}", prompt, 48)]) for prompt in prompts])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_weights_answer_alike_split_and_colocated(tmp_path: Path, dtype: str) -> None:
    """One request at a time, as above; and other tokens than the weights give that they are made of."""
    write_model_dir(tmp_path / "model")
    draw, answers = random.Random(3), []
    prompts = [[draw.randrange(TINY.vocab_size) for _ in range(length)] for length in (3, 70, 200)]
    for pools, quantization in (("1P1D", "int8"), ("colocated", "int8"), ("colocated", "none")):
        with real(
            tmp_path / "model", pools, dtype=dtype, quantization=quantization, max_num_batched_tokens=64
        ) as deployment:
            answers.append([deployment.answer([asked(f"{len(prompt)}", prompt, 48)]) for prompt in prompts])
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_sixteen_mixed_requests_in_every_pool_under_every_policy(pools: str, policy: str) -> None:
    num_prefill, num_decode = POOLS[pools]
    pool = {"max_model_len": 512, "max_num_batched_tokens": 48, "max_num_seqs": 4, "num_blocks": 40}
    tree = {
        "runner": "arithmetic",
        "prefill": {**pool, "replicas": num_prefill},
        "decode": {**pool, "replicas": num_decode},
        "router": {"policy": policy},
    }
    requests, expected = [], {}
    for index in range(16):
        prompt = [7] * (index % 3 * 32) + [index + 1] * (1 + index * 11 % 90)
        sampled = index % 2 == 1
        sampling = SamplingParams(temperature=1.0, seed=index) if sampled else SamplingParams()
        requests.append(asked(f"r{index}", prompt, 5 + index, sampling))
        expected[f"r{index}"] = expected_tokens(prompt, 5 + index, seed=index if sampled else 0)
    with LocalDeployment(from_tree(tree)) as deployment:
        assert deployment.answer(requests) == expected
        disaggregated = deployment.router.counters["disaggregated"]
    assert disaggregated == (16 if num_prefill else 0)
