"""The last part of a schedule: the tokens that were placed become a batch."""

import numpy as np

from engine.runner import Batch
from engine.scheduler import loops_step as loops
from engine.scheduler.loops_sequences import Positions
from engine.scheduler.loops_step import Scheduled
from engine.scheduler.sequence_table import InFlightStep
from engine.scheduler.state import SchedulerState
from protocol.arrays import Int32


def launch(state: SchedulerState) -> Batch | None:
    """Makes the batch of the tokens that were placed, and counts them as computed. Returns None where there is neither
    a token to compute nor a block to copy out."""
    table = state.table
    scheduled = Scheduled(np.empty((loops.NUM_SCHEDULED_LINES, len(table)), np.int32))
    sample = np.empty(len(table), np.bool_)
    size = loops.launch(table.state, int(state.proposer is not None), scheduled, sample)
    if not size and not state.swap_out:
        return None
    positions, num_scheduled = Positions(scheduled[loops.AT_POSITION, :size]), scheduled[loops.NUM_TOKENS, :size]
    ahead = scheduled[loops.NUM_AHEAD, :size]
    request_ids = table.request_ids
    if size < len(table):
        request_ids = [request_ids[position] for position in positions.tolist()]
    batch = Batch(
        step=state.num_steps,
        rows=scheduled[loops.AT_ROW, :size],
        num_scheduled=num_scheduled,
        num_computed=scheduled[loops.NUM_BEFORE, :size],
        sample=sample[:size],
        token_ids=table.token_ids,
        block_tables=table.block_tables,
        request_ids=request_ids,
        sampling=table.sampling if table.sampling.num_special else None,
        num_drafts=ahead if state.proposer is not None else None,
        pending=ahead > 0 if table.in_flight else None,
    )
    if state.config.cuda_graph_sizes and int(num_scheduled.max(initial=0)) == 1:
        state.num_padding_tokens += state.padding(size)
    if state.swap_out or state.swap_in:
        batch.swap_out, batch.swap_in = _pairs(state.swap_out), _pairs(state.swap_in)
        state.swap_out, state.swap_in = [], []
    state.num_steps += 1
    table.in_flight.append(InFlightStep(batch, positions))
    state.blocks.step_scheduled()
    return batch


def _pairs(blocks: list[tuple[int, int]]) -> Int32 | None:
    """The pairs as an array [n, 2]; None where there is nothing to copy."""
    return np.array(blocks, np.int32) if blocks else None
