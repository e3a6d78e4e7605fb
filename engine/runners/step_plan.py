"""A batch laid flat: one entry per token, then per sequence. numpy only; vectorised over the batch."""

from dataclasses import dataclass

import numpy as np

from engine.runner import Batch
from protocol.arrays import Int32, Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """T tokens of B sequences, each sequence's tokens consecutive and in order."""

    token_ids: Int64
    """[T]"""
    positions: Int64
    """[T] index in its sequence."""
    slots: Int64
    """[T] where K and V go: block id * block_size + offset in the block."""
    starts: Int64
    """[B + 1] sequence b owns tokens [starts[b], starts[b + 1])."""
    contexts: Int64
    """[B] tokens whose KV is in the cache once this step's is written."""
    block_tables: Int32
    """[B, widest of this batch]; beyond a sequence's own blocks anything may stand."""
    sampled: Int64
    """[S] sequences that choose a token, ascending."""
    num_drafts: Int64
    """[S] drafts at the end of each of them."""
    sampled_tokens: Int64
    """[L] tokens after which one is chosen, as indices into the T tokens: the last known one of each of them, then its
    drafts.
    """


def plan_step(batch: Batch, block_size: int) -> StepPlan:
    """Flattens a batch. Copies what it needs of the shared arrays."""
    scheduled, computed = batch.num_scheduled.astype(np.int64), batch.num_computed.astype(np.int64)
    starts = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(scheduled, out=starts[1:])
    contexts = computed + scheduled
    positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(computed - starts[:-1], scheduled)
    rows = np.repeat(batch.rows, scheduled)
    blocks = batch.block_tables[rows, positions // block_size].astype(np.int64)
    widest = -(-int(contexts.max()) // block_size)
    sampled = np.flatnonzero(batch.sample)
    num_drafts, sampled_tokens = np.zeros(len(sampled), np.int64), starts[sampled + 1] - 1
    if batch.num_drafts is not None:
        num_drafts = batch.num_drafts[sampled].astype(np.int64)
        num_chosen = 1 + num_drafts
        sampled_tokens = np.repeat(sampled_tokens + 1 - np.cumsum(num_chosen), num_chosen) + np.arange(num_chosen.sum())
    return StepPlan(
        token_ids=batch.token_ids[rows, positions].astype(np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        starts=starts,
        contexts=contexts,
        block_tables=np.ascontiguousarray(batch.block_tables[batch.rows, :widest]),
        sampled=sampled,
        num_drafts=num_drafts,
        sampled_tokens=sampled_tokens,
    )
