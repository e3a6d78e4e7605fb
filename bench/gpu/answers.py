"""Compares two sets of answers. Floats differ with the order of sums, so either token of a close call is right."""

import math
from collections.abc import Sequence

import numpy as np

from bench.gpu.report import Item, Note, Problem
from engine.config import EngineConfig
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.arrays import Int32
from protocol.messages import RequestKey, SamplingParams
from router.admission import ClientRequest

CLOSE_CALL = 1e-3
"""Of two tokens whose logits are closer than this, either may be chosen. float32 logits differ by up to 4e-5 with the
order of their sums.
"""
MAX_TOKENS, NUM_TOP = 1024, 10

Answers = dict[str, list[int]]
"""Token ids by request id."""


def compare(
    what: str, requests: Sequence[ClientRequest], expected: Answers, answers: Answers, cpu: Runner
) -> list[Item]:
    """Notes for answers that may differ from the expected ones, and problems for those that may not.

    A greedy answer may differ from a close call on, and `cpu` tells how close the call was. One sampled answer may
    differ, because its draw may lie next to an edge of the distribution.
    """
    items: list[Item] = []
    unlike = [asked for asked in requests if answers[asked.request_id] != expected[asked.request_id]]
    for asked in unlike:
        ours, right = answers[asked.request_id], expected[asked.request_id]
        if len(ours) != len(right):
            items.append(Problem(f"{what}, {asked.request_id}: {len(ours)} tokens, expected {len(right)}"))
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, right, strict=True)) if a != b)
        text = f"{what}, {asked.request_id}: token {at} is {ours[at]}, expected {right[at]}"
        if asked.sampling.temperature:
            items.append(Note(text))
            continue
        known = np.concatenate((asked.prompt_token_ids, np.array(right[:at], np.int32)))
        margin = margin_over(cpu, known, ours[at])
        items.append((Note if margin < CLOSE_CALL else Problem)(f"{text}; the CPU prefers it by {margin:.2g}"))
    num_sampled = sum(asked.sampling.temperature > 0 for asked in unlike)
    if num_sampled > 1:
        items.append(Problem(f"{what}: {num_sampled} sampled answers are not those of the CPU"))
    return items


def margin_over(runner: Runner, token_ids: Int32, other: int) -> float:
    """By how much the logit of the likeliest next token exceeds that of `other`; infinite if `other` is not among the
    ten likeliest.
    """
    config = EngineConfig(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=1, max_model_len=MAX_TOKENS)
    scheduler = Scheduler(config, num_blocks=2 + MAX_TOKENS // config.block_size)
    sampling = SamplingParams(logprobs=NUM_TOP)
    scheduler.add(
        Request(
            key=RequestKey(1, "margin", 1),
            request_number=0,
            prompt_token_ids=token_ids,
            max_tokens=1,
            sampling=sampling,
        )
    )
    batch = scheduler.schedule()
    assert batch is not None
    (told,) = runner.execute(batch).logprobs[0]
    return told.top[0] - dict(zip(told.top_token_ids, told.top, strict=True)).get(other, -math.inf)
