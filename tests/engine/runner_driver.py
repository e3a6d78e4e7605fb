"""Drives a runner by hand: whole prompts cut into chunks by a token budget, then decodes; blocks in scattered order."""

from collections.abc import Sequence

import numpy as np

from engine.runner import Batch, Runner


def make_batch(
    token_ids: list[list[int]], computed: list[int], scheduled: list[int], tables: list[list[int]], step: int = 0
) -> Batch:
    """One batch over rows 0..B-1; a sequence samples when its chunk reaches its last known token."""
    width, blocks = max(len(ids) for ids in token_ids), max(len(table) for table in tables)
    known = np.zeros((len(token_ids), width), dtype=np.int32)
    block_tables = np.zeros((len(tables), blocks), dtype=np.int32)
    for row, (ids, table) in enumerate(zip(token_ids, tables, strict=True)):
        known[row, : len(ids)] = ids
        block_tables[row, : len(table)] = table
    rows = np.array([row for row, n in enumerate(scheduled) if n], dtype=np.int32)
    num_scheduled, num_computed = np.array(scheduled, dtype=np.int32)[rows], np.array(computed, dtype=np.int32)[rows]
    lengths = np.array([len(ids) for ids in token_ids], dtype=np.int32)[rows]
    return Batch(
        step=step,
        rows=rows,
        num_scheduled=num_scheduled,
        num_computed=num_computed,
        sample=num_computed + num_scheduled == lengths,
        token_ids=known,
        block_tables=block_tables,
        request_ids=[str(row) for row in rows],
    )


def generate(
    runner: Runner,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    budget: int,
    block_size: int,
    num_blocks: int,
    forced: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Greedy answers of `num_tokens` each, all prompts at once, no end-of-sequence. Block 0 is never used.

    With `forced`, those tokens are fed instead of the chosen ones (teacher forcing); the chosen ones are returned.
    """
    free = list(np.random.default_rng(0).permutation(np.arange(1, num_blocks)))
    known = [list(prompt) for prompt in prompts]
    tables: list[list[int]] = [
        [int(free.pop()) for _ in range(-(-(len(p) + num_tokens) // block_size))] for p in prompts
    ]
    computed, answers = [0] * len(known), [[] for _ in known]  # type: tuple[list[int], list[list[int]]]
    step = 0
    while any(len(answer) < num_tokens for answer in answers):
        left, scheduled = budget, []
        for ids, done, answer in zip(known, computed, answers, strict=True):
            n = min(len(ids) - done, left) if len(answer) < num_tokens else 0
            left -= n
            scheduled.append(n)
        batch = make_batch(known, computed, scheduled, tables, step)
        output = runner.execute(batch)
        for i, row in enumerate(batch.rows.tolist()):
            computed[row] += scheduled[row]
            if output.counts[i]:
                token = int(output.token_ids[i, 0])
                known[row].append(forced[row][len(answers[row])] if forced else token)
                answers[row].append(token)
        step += 1
    return answers
