"""The next tokens, chosen on the device: order, meaning and draws are those of `engine/sampling.py`, whose docstring
has the rules.

    mask                 step 0
    add_biases, forbid   step 2: few and scattered, so torch's own indexed operations
    penalise             step 3
    sample, greedy       steps 4 to 6
    logprobs             step 1, from logits that nothing has touched yet

One program takes one row of logits, a few thousand at a time; every row is summed in one order whatever else is in the
batch. Nothing is sorted: weights lie between 0 and 1, where the bits of a float32 read as an integer have the order of
the values, so the least weight that `top_k` or `top_p` leaves is found by trying 16 thresholds in one pass over the
row, then 16 between the two that enclose it: at most 8 passes, about 4 where the weights lie apart. The mass above a
threshold is a float32 sum, where the CPU adds in float64: a `top_p` within 1e-6 of a token's edge may cut on the other
side of it. The draw itself adds in float64.

The file is longer than 300 lines because it holds the rules of one docstring, step by step.
"""

import torch

from engine.kernels.launch import tl, triton
from engine.sampling_metadata import GREEDY_BELOW

COLD = tl.constexpr(GREEDY_BELOW)
OF_PROMPT = tl.constexpr(1 << 30)
"""In a count of occurrences in the answer: the prompt has the token too."""
ABOVE_ONE = tl.constexpr(0x3F800001)
"""Bits of the first float32 above 1, the highest weight."""
BLOCK = 4096
PIVOT_BLOCK = 2048
NUM_WARPS = 16
METADATA = (
    *("rows", "num_known", "last", "answer_bases", "repetitions", "presences", "frequencies"),
    *("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "indices"),
)
"""Parameters of kernels that are pieces of one buffer: no kernel is compiled again for where a piece begins."""


def mask(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Step 0, in place: of the `rows` int64 [G] of `logits` float32 [S, vocab] (rows contiguous), tokens whose bit in
    `allowed` int32 [G, ceil(vocab / 32)] (contiguous, the lowest bit first) is 0 get -inf.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    if num_rows:
        mask_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits, rows, allowed, vocab_size, logits.stride(0), allowed.stride(0), BLOCK=BLOCK, num_warps=8
        )


def add_biases(logits: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Step 2: adds `values` float32 [N] to float32 [S, vocab] at `positions` int64 [N], row * vocab + token id, no two
    alike.
    """
    logits.view(-1).index_add_(0, positions, values)


def forbid(logits: torch.Tensor, positions: torch.Tensor) -> None:
    """Step 2: the tokens at `positions` (as for `add_biases`) cannot be chosen. After `add_biases`."""
    logits.view(-1).index_fill_(0, positions, float("-inf"))


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_known: torch.Tensor,
    last: torch.Tensor,
    answer_bases: torch.Tensor,
    repetitions: torch.Tensor,
    presences: torch.Tensor,
    frequencies: torch.Tensor,
) -> None:
    """Step 3, in place. Every [S] tensor belongs to the rows of `logits`.

    logits        float32 [S, vocab], rows contiguous
    counts        int32 [S, vocab], contiguous, scratch
    token_ids     int32 [num_rows, max_model_len], rows contiguous; sequence s has its known tokens in row rows[s]
    rows, num_known, last, answer_bases   int32 [S], as in `engine.sampling.Contexts` and `SamplingMetadata`:
                  of num_known[s] tokens the last is last[s]; the token at position p belongs to the answer from
                  answer_bases[s] + p = 0 on
    repetitions, presences, frequencies   float32 [S]; 1, 0 and 0 leave a row alone
    """
    num_sequences, vocab_size = logits.shape
    if not num_sequences:
        return
    counts.zero_()
    penalties = repetitions, presences, frequencies
    count_kernel[(num_sequences, triton.cdiv(token_ids.shape[1], BLOCK))](
        counts,
        token_ids,
        rows,
        num_known,
        last,
        answer_bases,
        *penalties,
        vocab_size,
        token_ids.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    penalise_kernel[(num_sequences, triton.cdiv(vocab_size, BLOCK))](
        logits, counts, *penalties, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=8
    )


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The likeliest token of each row of `logits` [S, vocab] (any float, rows contiguous), the first of equals, into
    int32 [S].
    """
    num_rows, vocab_size = logits.shape
    if num_rows:
        greedy_kernel[(num_rows,)](logits, out, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS)


def sample(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Steps 4 to 6: one token for each row of `logits` float32 [S, vocab] (rows contiguous, used up) into `out` int32
    [S].

    temperatures, top_ps, min_ps   float32 [S]; rows with a temperature below GREEDY_BELOW take the likeliest token
    top_ks                         int32 [S]; 0 or less: all
    seeds                          int64 [S], the bits of the unsigned seed
    indices                        int64 [S], of the token in the whole answer
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    stride = logits.stride(0)
    weigh_kernel[(num_rows,)](logits, temperatures, min_ps, out, vocab_size, stride, BLOCK=BLOCK, num_warps=NUM_WARPS)
    draw_kernel[(num_rows,)](
        logits, temperatures, top_ks, top_ps, seeds, indices, out, vocab_size, stride, BLOCK=BLOCK,
        PIVOT_BLOCK=PIVOT_BLOCK,
        RUNS=triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK)), num_warps=NUM_WARPS,
    )  # fmt: skip


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one token of each row of `logits` [A, vocab], and of the row's `num_top` likeliest, the first of equals first.

    Float32 [A]; int64 [A, num_top] token ids; float32 [A, num_top]. `token_ids`: integers [A].
    """
    scores = logits.float()
    shifts = torch.logsumexp(scores, dim=1, keepdim=True)
    own = scores.gather(1, token_ids.long()[:, None]) - shifts
    top = scores.topk(num_top, dim=1).indices.sort(dim=1).values  # equals come from topk in any order
    values, order = scores.gather(1, top).sort(dim=1, descending=True, stable=True)
    return own[:, 0], top.gather(1, order), values - shifts


@triton.jit
def changed(repetition, presence, frequency):
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit(
    do_not_specialize=["stride"],  # the longest history of the step
    do_not_specialize_on_alignment=["token_ids", *METADATA],
)
def count_kernel(
    counts,
    token_ids,
    rows,
    num_known,
    last,
    answer_bases,
    repetitions,
    presences,
    frequencies,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
):
    """Program (sequence, BLOCK of its known tokens)."""
    s = tl.program_id(0)
    known = tl.load(num_known + s)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < known
    if tl.program_id(1) * BLOCK >= known or not changed(
        tl.load(repetitions + s), tl.load(presences + s), tl.load(frequencies + s)
    ):
        return
    tokens = tl.load(token_ids + tl.load(rows + s).to(tl.int64) * stride + positions, mask=inside, other=0)
    tokens = tl.where(positions == known - 1, tl.load(last + s), tokens)
    answered = tl.load(answer_bases + s) + positions >= 0
    at = counts + s.to(tl.int64) * vocab_size + tokens
    tl.atomic_add(at, 1, mask=inside & answered, sem="relaxed")
    tl.atomic_or(at, OF_PROMPT, mask=inside & (answered == 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=METADATA)
def penalise_kernel(logits, counts, repetitions, presences, frequencies, vocab_size, stride, BLOCK: tl.constexpr):
    """Program (sequence, BLOCK of the vocabulary)."""
    s = tl.program_id(0)
    repetition, presence, frequency = tl.load(repetitions + s), tl.load(presences + s), tl.load(frequencies + s)
    if not changed(repetition, presence, frequency):
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    seen = tl.load(counts + s.to(tl.int64) * vocab_size + tokens, mask=inside, other=0)
    at = logits + s.to(tl.int64) * stride + tokens
    scores = tl.load(at, mask=inside, other=0.0)
    repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
    times = seen & (OF_PROMPT - 1)
    penalised = tl.where(times > 0, repeated - frequency * times - presence, repeated)
    tl.store(at, penalised, mask=inside & (seen != 0))


@triton.jit(do_not_specialize_on_alignment=("rows", "allowed"))
def mask_kernel(logits, rows, allowed, vocab_size, stride, num_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    words = tl.load(allowed + entry * num_words + at // 32, mask=inside, other=0)
    row = tl.load(rows + entry)
    tl.store(logits + row * stride + at, float("-inf"), mask=inside & (((words >> (at % 32)) & 1) == 0))


@triton.jit
def likeliest(logits, vocab_size, BLOCK: tl.constexpr):
    """(the highest, its first token) of one row."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = tl.arange(0, BLOCK)
    for first in tl.range(0, vocab_size, BLOCK, num_stages=4):
        at = first + tl.arange(0, BLOCK)
        scores = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        better = scores > highest
        highest = tl.where(better, scores, highest)
        tokens = tl.where(better, at, tokens)
    top = tl.max(highest, 0)
    return top, tl.min(tl.where(highest == top, tokens, vocab_size), 0)


@triton.jit
def greedy_kernel(logits, out, vocab_size, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _, token = likeliest(logits + row.to(tl.int64) * stride, vocab_size, BLOCK)
    tl.store(out + row, token)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def weigh_kernel(logits, temperatures, min_ps, out, vocab_size, stride, BLOCK: tl.constexpr):
    """Turns a row's logits into weights, those below `min_p` into 0; a cold row gets its token and keeps its logits."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top, token = likeliest(logits, vocab_size, BLOCK)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    if temperature < COLD:
        tl.store(out + row, token)
        return
    for first in tl.range(0, vocab_size, BLOCK, num_stages=4):
        at = first + tl.arange(0, BLOCK)
        scores = tl.load(logits + at, mask=at < vocab_size, other=0.0)
        weights = tl.exp(tl.div_rn(scores - top, temperature))
        tl.store(logits + at, tl.where(weights >= min_p, weights, 0.0), mask=at < vocab_size)


@triton.jit
def least_kept(weights, vocab_size, low, goal, share, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of the highest threshold, `low` or above, that enough weights reach: `goal` of them, or, BY_MASS with a
    `goal` below 0, so many that their sum is `share` of the sum of all that reach `low`. Any threshold that leaves the
    same weights does as well.
    """
    high, at_high, searching = ABOVE_ONE, 0.0, True
    while searching:
        pivots = low + tl.cdiv(high - low, 16) * tl.arange(0, 16)
        least = pivots.to(tl.float32, bitcast=True)[:, None]
        sums = tl.zeros([16, BLOCK], tl.float32)
        for first in tl.range(0, vocab_size, BLOCK, num_stages=4):
            at = first + tl.arange(0, BLOCK)[None, :]
            values = tl.load(weights + at, mask=at < vocab_size, other=-1.0)
            sums += tl.where(values >= least, values if BY_MASS else 1.0, 0.0)
        reached = tl.sum(sums, 1)  # falls from pivot to pivot, rounding or not; the first is `low`
        if BY_MASS:
            goal = tl.where(goal < 0, share * tl.max(reached, 0).to(tl.float64), goal)
        enough = reached.to(tl.float64) >= goal
        at_low = tl.min(tl.where(enough, reached, float("inf")), 0)
        at_high = tl.maximum(at_high, tl.max(tl.where(enough, 0.0, reached), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
        low = tl.max(tl.where(enough, pivots, low), 0)
        each = low.to(tl.float32, bitcast=True) if BY_MASS else 1.0
        searching = (high - low > 1) & (at_low - at_high >= 1.5 * each)  # else one weight at most lies between the two
    return low


@triton.jit
def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def draw_kernel(
    weights, temperatures, top_ks, top_ps, seeds, indices, out, vocab_size, stride,
    BLOCK: tl.constexpr, PIVOT_BLOCK: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Cuts a row of weights by `top_k` and `top_p` and draws; RUNS: of BLOCK weights, a power of two."""
    row = tl.program_id(0)
    if tl.load(temperatures + row) < COLD:
        return
    weights += row.to(tl.int64) * stride
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    low = tl.full([], 0, tl.int32)
    if top_k > 0 and top_k < vocab_size:
        low = least_kept(weights, vocab_size, low, top_k.to(tl.float64), 0.0, False, PIVOT_BLOCK)
    if top_p < 1:
        low = least_kept(
            weights, vocab_size, low, tl.full([], -1.0, tl.float64), top_p.to(tl.float64), True, PIVOT_BLOCK
        )
    least = low.to(tl.float32, bitcast=True)
    runs, inside = tl.arange(0, RUNS), tl.arange(0, BLOCK)
    sums = tl.zeros([RUNS], tl.float64)
    for run in tl.range(0, tl.cdiv(vocab_size, BLOCK), num_stages=4):
        values = tl.load(weights + run * BLOCK + inside, mask=run * BLOCK + inside < vocab_size, other=0.0)
        sums = tl.where(runs == run, tl.sum(tl.where(values >= least, values, 0.0).to(tl.float64), 0), sums)
    bits = (
        mix(tl.load(seeds + row).to(tl.uint64, bitcast=True))
        + (tl.load(indices + row) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    )
    target = (mix(bits) >> 11).to(tl.float64) * 2.0**-53 * tl.sum(sums, 0)
    # rounding may leave the target at the very end, or a later sum below an earlier one: only what has a weight is
    # chosen, else the last
    passed = (tl.cumsum(sums, 0) > target) & (sums > 0)
    run = tl.min(tl.where(passed, runs, tl.max(tl.where(sums > 0, runs, 0), 0)), 0)
    tokens = run * BLOCK + inside
    values = tl.load(weights + tokens, mask=tokens < vocab_size, other=0.0)
    values = tl.where(values >= least, values, 0.0).to(tl.float64)
    target -= tl.sum(tl.where(runs < run, sums, 0.0), 0)
    passed = (tl.cumsum(values, 0) > target) & (values > 0)
    tl.store(out + row, tl.min(tl.where(passed, tokens, tl.max(tl.where(values > 0, tokens, 0), 0)), 0))
