"""The device's choices against those of `engine/sampling.py`, which `tests/engine/test_sampling.py` checks against a
plain reference.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine import sampling as on_cpu
from engine.kernels import sampling
from engine.sampling_metadata import Contexts, Masks, SamplingMetadata
from protocol.arrays import Float32
from protocol.messages import SamplingParams

VOCAB = 9001
"""Three runs of the kernels' width, the last one not full."""


def asked(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **options})


CHOICES: list[SamplingParams] = [
    asked(),
    asked(temperature=0.7),
    asked(temperature=1e-6),
    asked(temperature=3.0, top_k=50),
    asked(top_k=1),
    asked(top_k=VOCAB - 1),
    asked(top_k=VOCAB + 5),
    asked(top_p=0.9),
    asked(top_p=0.3, temperature=1.5),
    asked(top_p=1e-6),
    asked(top_p=0.999),
    asked(min_p=0.05),
    asked(min_p=0.3, temperature=5.0),
    asked(min_p=1.0, top_k=3, top_p=0.5),
    asked(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02),
]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def choose_both(
    scores: Float32, choices: Sequence[SamplingParams], seeds: Sequence[int], index: int
) -> tuple[list[int], list[int]]:
    """What the kernels and the CPU choose for every row of `scores` at `index` of its answer."""
    count = len(choices)
    table = SamplingMetadata(count)
    for row, (params, seed) in enumerate(zip(choices, seeds, strict=True)):
        table.put(row, replace(params, seed=seed), base=index, eos_token_ids=())
    nobody = np.zeros(count, np.int32)
    contexts = Contexts(np.arange(count, dtype=np.int32), nobody, np.zeros((count, 1), np.int32), nobody)
    expected, _ = on_cpu.sample_tokens(torch.from_numpy(scores.copy()), table, contexts)
    out = torch.full((count,), -1, dtype=torch.int32)
    sampling.sample(
        torch.from_numpy(scores.copy()),
        temperatures=torch.from_numpy(table.temperatures),
        top_ks=torch.from_numpy(table.top_ks),
        top_ps=torch.from_numpy(table.top_ps),
        min_ps=torch.from_numpy(table.min_ps),
        seeds=torch.from_numpy(table.seeds.view(np.int64)),
        indices=torch.from_numpy(table.answer_bases.astype(np.int64)),
        out=out,
    )
    return out.tolist(), expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 4096, VOCAB])
def test_greedy_takes_the_first_of_equals(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 2 * vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :vocab_size]
    logits[1, -3:] = 40
    logits[2] = -torch.inf
    out = torch.full((3,), -1, dtype=torch.int32)
    sampling.greedy(logits, out)
    assert out.tolist() == [int(logits[0].float().argmax()), vocab_size - 3, 0]


def test_draws_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    """Peaked as a model's logits are, with seeds of all sizes."""
    scores = (rng.standard_normal((len(CHOICES), VOCAB)) * 3).astype(np.float32)
    for index, first_seed in ((0, 0), (1, 2**63), (700, 2**64 - len(CHOICES))):
        chosen, expected = choose_both(scores, CHOICES, range(first_seed, first_seed + len(CHOICES)), index)
        assert chosen == expected


def test_a_flat_row_and_one_that_knows_its_token(rng: np.random.Generator) -> None:
    scores = np.zeros((len(CHOICES), VOCAB), np.float32)
    chosen, expected = choose_both(scores, CHOICES, range(len(CHOICES)), 3)
    assert chosen == expected  # all equal: they stay together
    scores[:] = -np.inf
    scores[:, VOCAB - 1] = -5.0
    assert choose_both(scores, CHOICES, range(len(CHOICES)), 3)[0] == [VOCAB - 1] * len(CHOICES)


def test_equal_weights_stay_or_go_together() -> None:
    """Five levels of 200 tokens, scattered. A cut in the midst of a level keeps all of it: some draw falls on it, none
    behind it.
    """
    level = np.random.default_rng(0).permutation(VOCAB) % 45
    scores = np.where(level < 5, -level / 4, -np.inf).astype(np.float32)[None].repeat(12, 0)
    for params, kept in (
        (asked(top_k=150), 1),
        (asked(top_k=220), 2),
        (asked(top_p=0.5), 2),
        (asked(top_k=700, top_p=0.95), 4),
    ):
        chosen, expected = choose_both(scores, [params] * 12, range(12), 0)
        assert chosen == expected
        assert {int(level[token]) for token in chosen} == set(range(kept))


def test_a_large_vocabulary(rng: np.random.Generator) -> None:
    choices = [asked(top_p=0.95), asked(top_k=20, top_p=0.8, temperature=0.6)]
    scores = (rng.standard_normal((2, 151_936)) * 2).astype(np.float32)
    chosen, expected = choose_both(scores, choices, (1, 2), 5)
    assert chosen == expected


@pytest.mark.parametrize("vocab_size", [31, 97, 4096, 9001])
def test_masked_tokens_get_no_chance(rng: np.random.Generator, vocab_size: int) -> None:
    logits = rng.standard_normal((4, vocab_size)).astype(np.float32)
    allowed = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
    allowed[0, -1] = -(2**31)  # beyond a vocabulary that does not fill its last word
    rows = np.array([2, 0])
    expected = logits.copy()
    for row, bits in zip(rows, allowed, strict=True):
        for token in range(vocab_size):
            if not (int(bits[token // 32]) >> token % 32) & 1:
                expected[row, token] = -np.inf
    on_cpu._forbid(by_cpu := logits.copy(), Masks(rows, allowed, np.zeros(4, np.bool_), {}))
    ours = torch.from_numpy(logits)
    sampling.mask(ours, torch.from_numpy(rows), torch.from_numpy(allowed))
    assert (ours.numpy() == expected).all() and (by_cpu == expected).all()


def test_no_rows() -> None:
    none, ids = torch.empty(0), torch.empty(0, dtype=torch.int32)
    sampling.greedy(none.view(0, 9), ids)
    sampling.sample(
        none.view(0, 9),
        temperatures=none,
        top_ks=ids,
        top_ps=none,
        min_ps=none,
        seeds=ids.long(),
        indices=ids.long(),
        out=ids,
    )


def test_penalties_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    """The penalised logits themselves must agree. Rows are shuffled, one is left alone, one has no prompt, one no
    answer.
    """
    choices = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5),
        SamplingParams(frequency_penalty=0.4),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.1, repetition_penalty=1.1),
        SamplingParams(),
    ]
    count, longest = len(choices), 5000
    num_known = np.array([longest, 3, 700, 1, 40], np.int32)
    prompt = np.array([4000, 3, 100, 0, 20])
    rows = np.array([4, 0, 5, 2, 1], np.int32)
    token_ids = rng.integers(0, 300, (count + 1, longest)).astype(np.int32)
    last = rng.integers(0, VOCAB, count).astype(np.int32)
    token_ids[rows, num_known - 1] = -1  # not here yet
    table = SamplingMetadata(count + 1)
    for s, row in enumerate(rows.tolist()):
        table.put(row, choices[s], base=-int(prompt[s]), eos_token_ids=())
    scores = rng.standard_normal((count, VOCAB)).astype(np.float32)
    expected = scores.copy()
    on_cpu._penalise(expected, table, Contexts(rows, num_known, token_ids, last))
    ours = torch.from_numpy(scores.copy())
    sampling.penalise(
        ours,
        torch.full((count, VOCAB), -1, dtype=torch.int32),
        token_ids=torch.from_numpy(token_ids),
        rows=torch.from_numpy(rows),
        num_known=torch.from_numpy(num_known),
        last=torch.from_numpy(last),
        answer_bases=torch.from_numpy(table.answer_bases[rows]),
        repetitions=torch.from_numpy(table.repetitions[rows]),
        presences=torch.from_numpy(table.presences[rows]),
        frequencies=torch.from_numpy(table.frequencies[rows]),
    )
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[4], torch.from_numpy(scores[4]))
    assert not torch.equal(ours[:4], torch.from_numpy(scores[:4]))


def test_biases_and_forbidden_tokens() -> None:
    logits = torch.zeros(2, 5)
    sampling.add_biases(logits, torch.tensor([1, 8]), torch.tensor([2.0, -1.0]))
    sampling.forbid(logits, torch.tensor([5, 1]))
    assert logits.tolist() == [[0, -torch.inf, 0, 0, 0], [-torch.inf, 0, 0, -1, 0]]


@pytest.mark.parametrize("num_top", [0, 4])
def test_logprobs_are_those_of_the_cpu(num_top: int) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    logits[1, [7, 30, 12]] = 5.0
    tokens = torch.tensor([4, 12, 49], dtype=torch.int32)
    own, top, values = sampling.logprobs(logits, tokens, num_top)
    for row, told in enumerate(
        on_cpu.logprobs(logits.numpy(), tokens.numpy().astype(np.int64), np.full(3, num_top, np.int32))
    ):
        assert own[row].item() == pytest.approx(told.chosen, abs=1e-5)
        assert tuple(top[row].tolist()) == told.top_token_ids
        assert values[row].tolist() == pytest.approx(list(told.top), abs=1e-5)
