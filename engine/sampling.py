"""How the next token is chosen from logits, float32 [S, vocab]. A choice depends on the logits, the sequence's tokens
and parameters, and (seed, index in the whole answer): never on the batch, the engine or the attempt. So replays,
retries, drafts and handoffs agree.

In this order, all in float32 (the order and the meaning are vLLM's):

 0. tokens that a grammar does not allow get -inf
 1. logprobs are taken from the model's own logits
 2. `logit_bias` is added; before `min_tokens` the tokens that would end the answer get -inf, unless a grammar allows no
    other
 3. repetition penalty r on tokens of prompt and answer: logit / r if above 0, else logit * r
    then per token of the answer: - frequency_penalty * occurrences - presence_penalty
 4. temperature 0: the likeliest token, the first of equals
    else weight = exp((logit - highest logit) / temperature), so the highest weight is 1
 5. `min_p`: weights below it become 0; `top_k`: those below the k-th highest; `top_p`: those after the shortest run of
    highest weights that holds this share of the sum. Equal weights stay or go together.
 6. u = uniform(seed, index) in [0, 1); the chosen token is the first whose running sum of weights, in order of token
    ids, exceeds u * sum

    mix         = the finaliser of splitmix64 (xor-shift 30, * 0xBF58476D1CE4E5B9, 27, * 0x94D049BB133111EB, 31), modulo
                2**64
    uniform(seed, index) = mix(mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11, times 2**-53
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling_metadata import GREEDY_BELOW, Contexts, Masks, SamplingMetadata
from protocol.arrays import Bool, Float32, Int32, Int64, UInt64
from protocol.messages import TokenLogprobs

SUM_WIDTH = 256
"""Weights are summed in runs of so many, so that the running sum costs little where nobody looks at it."""
SORTED_WIDTH = 1024
"""Highest weights looked at first when `top_p` cuts; nearly always enough."""

Float64 = npt.NDArray[np.float64]


def greedy(logits: torch.Tensor) -> Int32:
    """The likeliest token of every row, the first of equals: int32 [S]."""
    token_ids: Int32 = logits.numpy().argmax(axis=-1).astype(np.int32)
    return token_ids


def sample_tokens(
    logits: torch.Tensor, sampling: SamplingMetadata, contexts: Contexts, masks: Masks | None = None
) -> tuple[Int32, dict[int, TokenLogprobs]]:
    """One token for each row of `logits` [S, vocab], int32 [S], and logprobs of those that asked, by index in S. What
    `masks` forbid gets -inf in `logits` themselves.
    """
    if masks is not None:
        _forbid(logits.numpy(), masks)
    chosen = greedy(logits)
    special = np.flatnonzero(sampling.special[contexts.rows])
    if not len(special):
        return chosen, {}
    scores: Float32 = logits[torch.from_numpy(special)].numpy()
    here = Contexts(contexts.rows[special], contexts.num_known[special], contexts.token_ids, contexts.last[special])
    num_top = sampling.num_logprobs[here.rows]
    asked = np.flatnonzero(num_top >= 0)
    own = scores[asked]
    _add_biases(scores, sampling, here, None if masks is None else masks.final[special])
    _penalise(scores, sampling, here)
    tokens: Int64 = scores.argmax(axis=1)
    warm = np.flatnonzero(sampling.temperatures[here.rows] >= GREEDY_BELOW)
    if len(warm):
        drawn_from = scores if len(warm) == len(scores) else scores[warm]
        tokens[warm] = _draw(drawn_from, sampling, here.rows[warm], here.num_known[warm])
    chosen[special] = tokens
    return chosen, dict(zip(special[asked].tolist(), logprobs(own, tokens[asked], num_top[asked]), strict=True))


def uniforms(seeds: UInt64, indices: Int64) -> Float64:
    """One number in [0, 1) for each (seed, index)."""
    bits = _mix(_mix(seeds) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    drawn: Float64 = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def logprobs(logits: Float32, token_ids: Int64, num_top: Int32) -> list[TokenLogprobs]:
    """Of one token of each row of `logits` [A, vocab], and of the row's `num_top` likeliest."""
    if not len(logits):
        return []
    highest = logits.max(axis=1, keepdims=True)
    shifts = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    reports = []
    for row, token_id, shift, count in zip(logits, token_ids.tolist(), shifts.tolist(), num_top.tolist(), strict=True):
        top = np.argpartition(row, -count)[-count:] if 0 < count < len(row) else np.arange(len(row) if count else 0)
        top = top[np.lexsort((top, -row[top]))]
        top = top[row[top] > -np.inf]  # what a grammar forbids is no candidate
        reports.append(
            TokenLogprobs(
                float(row[token_id]) - shift, tuple(top.tolist()), tuple((row[top] - np.float32(shift)).tolist())
            )
        )
    return reports


def _forbid(logits: Float32, masks: Masks) -> None:
    vocab_size = logits.shape[1]
    for index, allowed in zip(masks.which.tolist(), masks.allowed, strict=True):
        logits[index, np.unpackbits(allowed.view(np.uint8), count=vocab_size, bitorder="little") == 0] = -np.inf


def _add_biases(scores: Float32, sampling: SamplingMetadata, contexts: Contexts, final: Bool | None) -> None:
    short = sampling.too_short(contexts.rows, contexts.num_known, final)
    for i, row in enumerate(contexts.rows.tolist()):
        token_ids, values = sampling.biases[row]
        scores[i, token_ids] += values
        if short[i]:
            scores[i, sampling.ending[row]] = -np.inf


def _penalise(scores: Float32, sampling: SamplingMetadata, contexts: Contexts) -> None:
    rows = contexts.rows
    changed = (sampling.repetitions[rows] != 1) | (sampling.frequencies[rows] != 0) | (sampling.presences[rows] != 0)
    which = np.flatnonzero(changed)
    if not len(which):
        return
    counts = contexts.num_known[which]
    line = np.repeat(which, counts)
    positions = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = contexts.token_ids[rows[line], positions]
    tokens[np.cumsum(counts) - 1] = contexts.last[which]
    before, factor = scores[line, tokens], sampling.repetitions[rows[line]]
    scores[line, tokens] = np.where(before > 0, before / factor, before * factor)  # the same value at every occurrence
    answered = np.flatnonzero(sampling.answer_bases[rows[line]] + positions >= 0)
    line, tokens = line[answered], tokens[answered]
    np.subtract.at(scores, (line, tokens), sampling.frequencies[rows[line]])
    scores[line, tokens] = scores[line, tokens] - sampling.presences[rows[line]]


def _draw(scores: Float32, sampling: SamplingMetadata, rows: Int32, num_known: Int32) -> Int64:
    """Steps 4 to 6 for rows [N] with a temperature; `scores` [N, vocab] is used up."""
    scores -= scores.max(axis=1, keepdims=True)
    scores /= sampling.temperatures[rows][:, None]
    weights: Float32 = np.exp(scores, out=scores)
    weights[weights < sampling.min_ps[rows][:, None]] = 0
    vocab_size = weights.shape[1]
    top_ks, top_ps = sampling.top_ks[rows], sampling.top_ps[rows]
    cut = np.flatnonzero(((top_ks > 0) & (top_ks < vocab_size)) | (top_ps < 1))
    if len(cut):
        least = np.zeros(len(weights), np.float32)
        least[cut] = _thresholds(weights[cut], np.where(top_ks[cut] > 0, top_ks[cut], vocab_size), top_ps[cut])
        weights *= weights >= least[:, None]
    indices = sampling.answer_bases[rows].astype(np.int64) + num_known
    return pick(weights, uniforms(sampling.seeds[rows], indices))


def _thresholds(weights: Float32, top_ks: Int32, top_ps: Float32) -> Float32:
    """The least weight that `top_k` and then `top_p` leave, per row of `weights` [N, vocab], which is sorted in
    place.
    """
    vocab_size = weights.shape[1]
    weights.sort(axis=1)
    least: Float32 = weights[np.arange(len(weights)), vocab_size - np.minimum(top_ks, vocab_size)]
    rows, width = np.flatnonzero(top_ps < 1), min(SORTED_WIDTH, vocab_size)
    weights[rows] *= weights[rows] >= least[rows, None]
    wanted = top_ps * weights.sum(axis=1, dtype=np.float64)
    while len(rows):
        sums = np.cumsum(weights[rows, : -width - 1 : -1], axis=1, dtype=np.float64)
        num_kept = np.minimum((sums < wanted[rows, None]).sum(axis=1) + 1, width)
        enough = (sums[:, -1] >= wanted[rows]) | (width == vocab_size)
        reached = rows[enough]
        least[reached] = np.maximum(least[reached], weights[reached, vocab_size - num_kept[enough]])
        rows, width = rows[~enough], min(4 * width, vocab_size)
    return least


def pick(weights: Float32, drawn: Float64) -> Int64:
    """Step 6: per row of `weights` [N, vocab], one above 0 at least, the token that `drawn` [N] in [0, 1) falls on."""
    count, vocab_size = weights.shape
    padded = np.zeros((count, -(-vocab_size // SUM_WIDTH), SUM_WIDTH), np.float32)
    padded.reshape(count, -1)[:, :vocab_size] = weights
    sums = np.cumsum(padded.sum(axis=2, dtype=np.float64), axis=1)
    target = drawn * sums[:, -1]
    every = np.arange(count)
    run = np.minimum((sums <= target[:, None]).sum(axis=1), (sums < sums[:, -1:]).sum(axis=1))
    target -= np.where(run > 0, sums[every, run - 1], 0.0)
    inside = padded[every, run]
    passed = (np.cumsum(inside, axis=1, dtype=np.float64) <= target[:, None]).sum(axis=1)
    last = (
        SUM_WIDTH - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    )  # rounding may leave the target at the very end of its run
    token_ids: Int64 = run * SUM_WIDTH + np.minimum(passed, last)
    return token_ids


def _mix(values: UInt64) -> UInt64:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
