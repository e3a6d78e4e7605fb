"""Which drafts stand: the rule that makes speculation change nothing but the number of steps."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.runner import StepOutput
from engine.runners.step_plan import StepPlan
from protocol.arrays import Int32, Int64
from protocol.messages import TokenLogprobs

Int = npt.NDArray[np.integer[Any]]


def num_accepted(drafts: Int, num_drafts: Int, targets: Int) -> Int64:
    """How many drafts of each of S sequences are what the model chose itself, up to the first that is not. int64 [S].

    `drafts` [S, K], row i valid in its first `num_drafts[i]` columns; `targets` [S, 1 + K]: column j is the choice
    after j drafts.
    """
    most = drafts.shape[1]
    right = (drafts == targets[:, :most]) & (np.arange(most) < num_drafts[:, None])
    accepted: Int64 = np.cumprod(right, axis=1).sum(axis=1)
    return accepted


def accept(
    plan: StepPlan, chosen: Int32, reports: dict[int, TokenLogprobs], failures: Mapping[int, str] = MappingProxyType({})
) -> StepOutput:
    """Of what was chosen after each of the L sampled tokens, what stands. `reports`, `failures`: by index in L; what
    fails after a draft does not count, since no such draft stands.
    """
    num_drafts, most = plan.num_drafts, int(plan.num_drafts.max(initial=0))
    first = np.cumsum(1 + num_drafts) - 1 - num_drafts
    index = first[:, None] + np.minimum(np.arange(1 + most), num_drafts[:, None])
    targets = chosen[index]
    accepted = num_accepted(plan.token_ids[plan.sampled_tokens[index[:, 1:]]], num_drafts, targets)
    token_ids, counts = np.zeros((len(plan.contexts), 1 + most), np.int32), np.zeros(len(plan.contexts), np.int32)
    token_ids[plan.sampled], counts[plan.sampled] = targets, accepted + 1
    logprobs = {
        sequence: [reports[ahead] for ahead in range(start, start + count)]
        for sequence, start, count in zip(plan.sampled.tolist(), first.tolist(), (accepted + 1).tolist(), strict=True)
        if start in reports
    }
    failed = {
        sequence: failures[start]
        for sequence, start in zip(plan.sampled.tolist(), first.tolist(), strict=True)
        if start in failures
    }
    return StepOutput(token_ids=token_ids, counts=counts, logprobs=logprobs, failures=failed)
