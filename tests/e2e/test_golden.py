"""Invariant I7 on the real model: float32 tokens through prefill, transfer and decode equal those of an independent
implementation and of a single engine.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.config import from_tree
from cluster.serve import Deployment
from tests.e2e.leftovers import none_left
from tests.hang import HANG_S
from twopass import Client

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())[
    "cases"
]


@pytest.fixture(scope="module", params=[1, 0], ids=["disaggregated", "colocated"])
def client(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Client]:
    pool = {"max_model_len": 512, "max_num_batched_tokens": 32, "max_num_seqs": 8, "num_blocks": 128}
    tree = {
        "model": str(demo_model),
        "dtype": "float32",
        "prefill": {**pool, "replicas": request.param},
        "decode": pool,
        "router": {"grpc_port": 0, "metrics_port": 0},
    }
    with (
        none_left(),
        Deployment(from_tree(tree), print) as deployment,
        Client(f"127.0.0.1:{deployment.ports.grpc_port}", timeout_s=HANG_S) as client,
    ):
        yield client


def test_all_golden_prompts_at_once(client: Client) -> None:
    """A budget of 32 tokens cuts most prompts into chunks, which share steps with decodes of other requests."""
    with ThreadPoolExecutor(len(CASES)) as threads:
        answers = list(
            threads.map(
                lambda case: client.generate_text(prompt_token_ids=case["prompt_ids"], max_tokens=48, ignore_eos=True),
                CASES,
            )
        )
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.token_ids == case["greedy_ids"], case["name"]
        assert answer.text.startswith(case["text"].split("<|im_end|>")[0]), case["name"]


def test_text_goes_in_and_out(client: Client) -> None:
    case = CASES[0]
    answer = client.generate_text(case["prompt"], max_tokens=48)
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", case["first_eos"] + 1)
    assert answer.text == case["text"].split("<|im_end|>")[0]
