"""The other half of a step: sampled tokens become known, sequences that are complete leave."""

import numpy as np
import numpy.typing as npt

from engine.outcome import Committed, Finished, PromptDone
from engine.runner import Batch
from engine.scheduler_state import Proposer, SchedulerState
from engine.sequence_table import NEVER
from protocol.messages import FinishReason, Logprobs, TokenLogprobs

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


def append_tokens(
    state: SchedulerState,
    batch: Batch,
    at: slice | Int32,
    columns: Int32,
    counts: Int32,
    logprobs: list[list[TokenLogprobs] | None] | None = None,
) -> Committed:
    """Applies what was sampled for R sequences.

    `at`: their positions; `columns`: int32 [R, K], row i valid in its first `counts[i]` columns; `logprobs`: [R], of those that asked.
    """
    table = state.table
    before, rows, limit = table.tokens[at], table.row[at], table.limit[at]
    kept, stopped = _cut_at_end(state, at, columns, counts, limit - before)
    for column in range(columns.shape[1]):
        have = kept > column
        if np.count_nonzero(have) == len(have):
            table.token_ids[rows, before + column] = columns[:, column]
        else:
            table.token_ids[rows[have], before[have] + column] = columns[have, column]
    committed = Committed(
        batch=batch,
        slots=table.slot[at].copy(),
        attempts=table.attempt[at].copy(),
        offsets=before + table.base[at],
        counts=kept,
        token_ids=columns[:, 0].copy() if columns.shape[1] == 1 else columns[np.arange(columns.shape[1]) < kept[:, None]],
    )
    after = before + kept
    done = after >= limit
    done |= stopped
    table.tokens[at] = after
    positions = table.all_positions[at]
    if logprobs is not None:
        _note_logprobs(committed, logprobs)
    if state.num_offers:
        done |= np.array([table.running[position].kv == "offer" for position in positions.tolist()], np.bool_)
    fresh = table.fresh[at].nonzero()[0]
    if fresh.size:
        _note_first(state, committed, positions[fresh].tolist(), fresh.tolist())
    if state.proposer is not None:
        table.computed[at] = after - 1
        _propose(state, state.proposer, positions[~done])
    if np.count_nonzero(done):
        _finish(state, committed, positions[done].tolist(), stopped[done].tolist())
    return committed


def _cut_at_end(state: SchedulerState, at: slice | Int32, columns: Int32, counts: Int32, room: Int32) -> tuple[Int32, Bool]:
    """How many of each row's tokens belong to its answer, and whether the last of them is a stop token."""
    table = state.table
    stops = np.zeros(columns.shape, np.bool_)
    if state.eos_token_ids:
        for token_id in state.eos_token_ids:
            stops |= columns == token_id
        if np.count_nonzero(ignoring := table.ignore_eos[at]):
            stops[ignoring > 0] = False
    if np.count_nonzero(own_stops := table.own_stops[at]):
        positions = table.all_positions[at]
        for index in own_stops.nonzero()[0].tolist():
            stop_token_ids = table.running[positions[index]].stop_token_ids
            stops[index] |= [token_id in stop_token_ids for token_id in columns[index].tolist()]
    if columns.shape[1] == 1:
        return counts.astype(np.int32), stops[:, 0]
    until_stop = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, NEVER).astype(np.int32)
    kept = np.minimum(np.minimum(counts, room), until_stop)
    return kept, kept == until_stop


def _note_logprobs(committed: Committed, logprobs: list[list[TokenLogprobs] | None]) -> None:
    for index, values in enumerate(logprobs):
        if values is not None:
            slot, attempt, offset = int(committed.slots[index]), int(committed.attempts[index]), int(committed.offsets[index])
            kept = values[: int(committed.counts[index])]
            committed.logprobs += [Logprobs(slot, attempt, offset + ahead, value) for ahead, value in enumerate(kept)]


def _note_first(state: SchedulerState, committed: Committed, positions: list[int], indices: list[int]) -> None:
    """Marks first tokens of the sequences at `positions`, whose entries in `committed` are `indices`.

    The entry of a remote one gets the token its prefill engine sampled in front.
    """
    table = state.table
    where: list[int] = []
    tokens: list[int] = []
    for position, index in zip(positions, indices, strict=True):
        table.fresh[position] = 0
        sequence = table.running[position]
        committed.first.append(sequence.request.key)
        if sequence.first_token_id is not None:
            where.append(index)
            tokens.append(sequence.first_token_id)
            committed.offsets[index] -= 1
            committed.counts[index] += 1
            sequence.first_token_id = None
            if (values := sequence.first_logprobs) is not None:
                slot, attempt, offset = int(committed.slots[index]), int(committed.attempts[index]), int(committed.offsets[index])
                committed.logprobs.append(Logprobs(slot, attempt, offset, values))
    if where:
        starts = np.cumsum(committed.counts) - committed.counts
        committed.token_ids = np.insert(committed.token_ids, starts[where] - np.arange(len(where)), tokens).astype(np.int32)


def _propose(state: SchedulerState, proposer: Proposer, positions: Int32) -> None:
    """Asks for drafts, never more than are still to come, less one, and puts them behind the known tokens."""
    table = state.table
    rows, num_tokens = table.row[positions].tolist(), table.tokens[positions]
    rooms = np.clip(table.limit[positions] - num_tokens - 1, 0, state.config.num_speculative_tokens)
    num_drafts = []
    for position, row, known, room in zip(positions.tolist(), rows, num_tokens.tolist(), rooms.tolist(), strict=True):
        drafts = proposer.propose(table.running[position].request.key, table.token_ids[row, :known], room)
        drafts = drafts[: state.config.max_model_len - known]  # a proposer that ignores the room is borne
        if drafts:
            table.token_ids[row, known : known + len(drafts)] = drafts
        num_drafts.append(len(drafts))
    table.goal[positions] = np.minimum(num_tokens + np.array(num_drafts, np.int32), table.cap[positions])


def _finish(state: SchedulerState, committed: Committed, positions: list[int], stopped: list[bool]) -> None:
    """Takes complete sequences out; the blocks of "offer" ones pass to whoever reads `committed`."""
    table = state.table
    for position, stop in zip(positions, stopped, strict=True):
        sequence = table.running[position]
        key, blocks = sequence.request.key, table.blocks_of(position)
        reason: FinishReason = "stop" if stop else "length"
        del state.live[key]
        if sequence.kv == "offer":
            complete = stop or int(table.tokens[position]) >= sequence.limit
            first = int(table.known(position)[-1])
            values = next((entry.values for entry in committed.logprobs if entry.slot == sequence.request.slot), None)
            committed.prompts.append(PromptDone(key, first, blocks, reason if complete else None, values))
            state.blocks.hand_over(len(blocks))
        else:
            committed.finished.append(Finished(key, sequence.request.slot, reason))
            state.blocks.release(blocks)
    state.leave(positions)
