"""Whole deployments of families that compute something else than a Llama. They must give the greedy tokens of
`transformers`, split and colocated, for prompts that are cut into chunks, exceed the window or are partly in the prefix
cache. All cases together take at most 2 minutes.
"""

from pathlib import Path

import pytest
import torch
import transformers

from cluster.config import from_tree
from tests.engine.test_architectures import MAX_MODEL_LEN, VOCAB_SIZE, write_reference
from tests.local_deployment import LocalDeployment, asked

NUM_TOKENS = 16
LEAST_MARGIN = 1e-4
"""Smallest difference of the two largest logits: some 50 times as much as the order of a sum changes a logit."""


def greedy(model_dir: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy answers of `transformers`, with a forward pass over the whole sequence for each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    with torch.inference_mode():
        for name, prompt in prompts.items():
            for _ in range(NUM_TOKENS):
                logits = model(torch.tensor([prompt + answers[name]]), use_cache=False).logits[0, -1]
                best = logits.topk(2)
                assert best.values[0] - best.values[1] > LEAST_MARGIN, "no test: either token would be right"
                answers[name].append(int(best.indices[0]))
            assert len(set(answers[name])) > NUM_TOKENS // 2, "no test: hardly anything is looked at"
    return answers


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("gemma 3", 24),
        ("gemma 3 stretched", 64),
        ("gemma 3", 256),
        ("phi 3 window", 24),
        ("phi 3 window", 96),
        ("phi 3 short", 64),
        ("phi 3 long", 96),
        ("phi 4 mini", 24),
        ("phi 4 mini", 64),
    ],
)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, head_dim: int) -> None:
    """Plain torch computes heads of 24, the compiled kernels all others."""
    torch.set_num_threads(1)
    write_reference(tmp_path, name, head_dim)
    draw = torch.Generator().manual_seed(3)
    long, other, short = (torch.randint(0, VOCAB_SIZE, (n,), generator=draw).tolist() for n in (75, 20, 40))
    first, then = {"long": long, "short": short}, {"from the cache": long[:50] + other, "again": long}
    expected = greedy(tmp_path, first | then)
    for num_prefill in (1, 0):
        pool = {
            "max_model_len": MAX_MODEL_LEN.get(name, 256),
            "max_num_seqs": 4,
            "num_blocks": 64,
            "max_num_batched_tokens": 32,
        }
        tree = {
            "model": str(tmp_path),
            "dtype": "float32",
            "prefill": {**pool, "replicas": num_prefill},
            "decode": pool,
        }
        with LocalDeployment(from_tree(tree)) as deployment:
            answers = deployment.answer(asked(each, prompt, NUM_TOKENS) for each, prompt in first.items())
            answers |= deployment.answer(asked(each, prompt, NUM_TOKENS) for each, prompt in then.items())
            assert deployment.router.counters["disaggregated"] == num_prefill * len(expected)
        assert answers == expected
