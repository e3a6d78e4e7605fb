"""Sampling against a plain reference, one row at a time, and against the distributions it stands for."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import SUM_WIDTH, greedy, pick, sample_tokens, uniforms
from engine.sampling_metadata import Contexts, SamplingMetadata
from protocol.messages import SamplingParams

EOS = 2
MASK = 2**64 - 1


def mix(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    return (mix((mix(seed % 2**64) + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53


def reference(
    logits: list[float], prompt: list[int], answer: list[int], index: int, params: SamplingParams
) -> tuple[int, float]:
    """The chosen token, and how far the draw was from choosing another (a share of the sum; inf where nothing is
    drawn).
    """
    scores = list(logits)
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    if index < params.min_tokens:
        for token_id in {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}:
            scores[token_id] = -math.inf
    for token_id in {*prompt, *answer}:
        factor = params.repetition_penalty
        scores[token_id] = scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
    for token_id in set(answer):
        scores[token_id] -= params.frequency_penalty * answer.count(token_id) + params.presence_penalty
    if params.temperature == 0:
        best = sorted(scores)[-2:]
        return scores.index(max(scores)), best[1] - best[0]
    weights = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k > 0:
        least = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    share, gap = 0.0, math.inf
    total = sum(weights)
    for weight in sorted(weights, reverse=True):
        if params.top_p == 1:
            break
        share += weight
        gap = min(gap, abs(share / total - params.top_p))
        if share >= params.top_p * total:
            weights = [other if other >= weight else 0.0 for other in weights]
            break
    target = uniform(params.seed or 0, index) * sum(weights)
    passed = 0.0
    chosen = -1
    for token_id, weight in enumerate(weights):
        passed += weight
        if weight:
            gap = min(gap, abs(passed - target) / total)
        if chosen < 0 and passed > target:
            chosen = token_id
    return chosen, gap


def make(
    params: list[SamplingParams], prompts: list[list[int]], answers: list[list[int]], base: int = 0
) -> tuple[SamplingMetadata, Contexts]:
    """Rows in reverse order; the last known token is only in `last`. `base`: tokens of the answer delivered by attempts
    before.
    """
    num_rows = len(params) + 1
    sampling = SamplingMetadata(num_rows)
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    token_ids = np.full((num_rows, max(map(len, known)) + 1), -1, np.int32)
    rows = list(range(num_rows - 1, 0, -1))
    for row, own, prompt, ids in zip(rows, params, prompts, known, strict=True):
        token_ids[row, : len(ids) - 1] = ids[:-1]
        sampling.put(row, own, base=base - len(prompt), eos_token_ids=(EOS,))
    num_known = np.array([len(ids) for ids in known], np.int32)
    return sampling, Contexts(
        np.array(rows, np.int32), num_known, token_ids, np.array([ids[-1] for ids in known], np.int32)
    )


VOCAB = 31
number = st.integers(0, VOCAB - 1)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 3, 30, 99]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((3, 4.0),), ((0, -100.0), (EOS, 2.0))]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 5]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
case = st.tuples(
    all_params, st.lists(number, min_size=1, max_size=12), st.lists(number, max_size=6), st.integers(0, 2**32)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(case, min_size=1, max_size=5))
def test_a_batch_chooses_what_the_reference_chooses_row_by_row(
    cases: list[tuple[SamplingParams, list[int], list[int], int]],
) -> None:
    params, prompts, answers, noise = (list(column) for column in zip(*cases, strict=True))
    logits = np.stack([np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32) for seed in noise])
    sampling, contexts = make(params, prompts, answers)
    chosen, reports = sample_tokens(torch.from_numpy(logits), sampling, contexts)
    for i, (own, prompt, answer, _) in enumerate(cases):
        expected, gap = reference(logits[i].tolist(), prompt, answer, len(answer), own)
        assert chosen[i] == expected or gap < 1e-5
        assert (i in reports) == (own.logprobs is not None)
        if i in reports:
            log_softmax = torch.log_softmax(torch.from_numpy(logits[i]).double(), -1).numpy()
            order = np.argsort(-log_softmax)[: own.logprobs]
            assert reports[i].chosen == pytest.approx(log_softmax[chosen[i]], abs=1e-5), (
                "before bias, penalties and temperature"
            )
            assert reports[i].top_token_ids == tuple(order.tolist())
            assert reports[i].top == pytest.approx(log_softmax[order], abs=1e-5)


def draws(params: SamplingParams, logits: list[float], count: int) -> np.ndarray[Any, Any]:
    """Shares of the tokens in `count` draws: one sequence each, seeds 0, 1, 2, ..."""
    own = [replace(params, seed=seed) for seed in range(count)]
    sampling, contexts = make(own, [[1]] * count, [[]] * count)
    chosen, _ = sample_tokens(torch.tensor([logits] * count), sampling, contexts)
    return np.bincount(chosen, minlength=len(logits)) / count


LOGITS = [1.0, 0.0, -1.0, 2.0, 2.0, -4.0, 0.5, 1.5]
SHARES = np.exp(LOGITS)


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        (SamplingParams(temperature=1.0), SHARES),
        (SamplingParams(temperature=0.5), SHARES**2),
        (SamplingParams(temperature=1.0, top_k=2), [0, 0, 0, 1, 1, 0, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=1), [0, 0, 0, 1, 1, 0, 0, 0]),  # equals stay together
        (SamplingParams(temperature=1.0, top_p=0.7), np.where(np.greater_equal(SHARES, np.exp(1.5)), SHARES, 0)),
        (SamplingParams(temperature=1.0, min_p=0.3), np.where(np.greater_equal(SHARES, 0.3 * np.exp(2.0)), SHARES, 0)),
        (SamplingParams(temperature=1.0, logit_bias=((0, 1.0),)), np.exp([2.0, *LOGITS[1:]])),
        (SamplingParams(temperature=1.0, repetition_penalty=2.0), np.exp([1.0, 0.0, *LOGITS[2:]])),
        (SamplingParams(temperature=1.0, min_tokens=1), np.where(np.arange(8) == EOS, 0, SHARES)),
    ],
)
def test_many_seeds_give_the_distribution_that_was_asked_for(params: SamplingParams, weights: Any) -> None:
    """Chi-square over 20,000 draws; the bound is the 1 - 1e-6 quantile for 7 degrees of freedom."""
    count, expected = 20_000, np.asarray(weights, float) / np.sum(weights)
    shares = draws(params, LOGITS, count)
    assert not shares[expected == 0].any()
    possible = expected > 0
    assert (count * (shares[possible] - expected[possible]) ** 2 / expected[possible]).sum() < 40


def test_indices_of_one_answer_are_independent_draws() -> None:
    """Pairs of consecutive draws of one seed fill a 10 x 10 grid evenly; seeds that follow each other do too."""
    for seeds, indices in ((np.full(20_001, 7), np.arange(20_001)), (np.arange(20_001), np.zeros(20_001, int))):
        drawn = uniforms(seeds.astype(np.uint64), indices)
        grid = np.histogram2d(drawn[:-1], drawn[1:], bins=10, range=[[0, 1], [0, 1]])[0]
        assert ((grid - 200) ** 2 / 200).sum() < 190  # 1 - 1e-7 quantile for 99 degrees of freedom


def test_uniforms_are_the_documented_ones() -> None:
    seeds, indices = [0, 1, 2**63 - 1, 2**64 - 1], [0, 1, 5, 100_000]
    got = uniforms(np.array(seeds, np.uint64), np.array(indices))
    assert got.tolist() == [uniform(seed, index) for seed, index in zip(seeds, indices, strict=True)]


def test_a_choice_depends_neither_on_the_batch_nor_on_where_the_attempt_began() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(3)) * 2
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, presence_penalty=0.5, min_tokens=9) for i in range(5)]
    params.append(SamplingParams())
    prompts, answers = [[i + 1, i + 2, 9] for i in range(6)], [list(range(i + 20, i + 26)) for i in range(6)]
    together, _ = sample_tokens(logits, *make(params, prompts, answers))
    alone = [
        int(sample_tokens(logits[i : i + 1], *make([params[i]], [prompts[i]], [answers[i]]))[0][0]) for i in range(6)
    ]
    assert together.tolist() == alone
    again = []  # a later attempt: the answer so far is the end of what it is given as its prompt
    for i in range(6):
        given = [*prompts[i], *answers[i]]
        sampling, contexts = make([params[i]], [given], [[]], base=len(answers[i]))
        again.append(int(sample_tokens(logits[i : i + 1], sampling, contexts)[0][0]))
    assert again == alone


def test_rows_without_wishes_are_greedy_and_the_flag_says_so() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    sampling, contexts = make(
        [SamplingParams(seed=5, stop_token_ids=(3,), top_k=4, top_p=0.5)] * 4, [[1]] * 4, [[]] * 4
    )
    assert sampling.num_special == 0
    assert sample_tokens(logits, sampling, contexts)[0].tolist() == greedy(logits).tolist()
    sampling.put(2, SamplingParams(logprobs=0), base=-1, eos_token_ids=())
    assert sampling.num_special == 1
    sampling.left(2)
    sampling.left(1)
    assert sampling.num_special == 0


@pytest.mark.parametrize("vocab_size", [1, SUM_WIDTH - 1, SUM_WIDTH, SUM_WIDTH + 1, 3 * SUM_WIDTH])
def test_picks_at_the_edges_are_tokens_with_a_weight(vocab_size: int) -> None:
    for where in {0, vocab_size // 2, vocab_size - 1}:
        weights = np.zeros((3, vocab_size), np.float32)
        weights[:, where] = [1.0, 1e-30, 0.3]
        for drawn in (0.0, 0.5, 1 - 2.0**-53):
            assert pick(weights, np.full(3, drawn)).tolist() == [where] * 3
    flat = np.full((1, vocab_size), 0.1, np.float32)
    assert [int(pick(flat, np.array([(i + 0.5) / vocab_size]))[0]) for i in range(vocab_size)] == list(
        range(vocab_size)
    )


def test_top_p_of_a_flat_distribution_keeps_its_share_of_a_large_vocabulary() -> None:
    """The 1,024 highest weights are not enough here."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 0.01, (1, 20_000)).astype(np.float32)
    weights = np.exp(logits[0].astype(float))
    params = [SamplingParams(temperature=1.0, top_p=0.3, seed=seed) for seed in range(200)]
    kept = set(
        sample_tokens(torch.from_numpy(logits.repeat(200, axis=0)), *make(params, [[1]] * 200, [[]] * 200))[0].tolist()
    )
    order = np.argsort(-weights)
    num_kept = int((np.cumsum(weights[order]) < 0.3 * weights.sum()).sum()) + 1
    ranks = sorted(order.argsort()[list(kept)].tolist())
    assert ranks[-1] <= num_kept + 1
    assert ranks[-1] > 0.95 * num_kept, "200 draws reach the edge"
    assert len(kept) > 150
