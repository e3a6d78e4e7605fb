"""The commit of a step: sampled tokens become known, and sequences that are complete leave."""

import numpy as np

from engine.runner import Batch, StepOutput
from engine.scheduler import loops_step as loops
from engine.scheduler.loops_sequences import Positions
from engine.scheduler.loops_step import Flat, Results, Sampled, Stops
from engine.scheduler.outcome import Committed, Finished, PromptDone
from engine.scheduler.sequence_table import NEVER, InFlightStep, SequenceTable
from engine.scheduler.state import Proposer, SchedulerState
from protocol.arrays import Int32, Int64
from protocol.errors import ProtocolError
from protocol.messages import FinishReason, Logprobs, RequestKey, TokenLogprobs


def commit_step(state: SchedulerState, output: StepOutput) -> Committed:
    """Applies the output of the oldest batch in flight. Raises ProtocolError if it does not match the batch."""
    table = state.table
    if not table.in_flight:
        raise ProtocolError("a commit without a batch in flight")
    in_flight_step = table.in_flight.popleft()
    batch, sampled = in_flight_step.batch, output.counts > 0
    if len(output.token_ids) != len(sampled) or sampled.tobytes() != batch.sample.tobytes():
        raise ProtocolError(
            f"step {batch.step}: tokens for entries {sampled.nonzero()[0]}, wanted for {batch.sample.nonzero()[0]}"
        )
    state.blocks.step_committed()
    table.committed(batch.step)
    progressed = _progress_of_producers(table, in_flight_step) if state.num_producers else []
    committed = _append_tokens(state, batch, in_flight_step.positions, output)
    committed.progressed = progressed
    if state.thrash is not None:
        state.thrash.add(recomputed=0, generated=len(committed.token_ids))
    if state.config.preemption == "auto":
        state.costs.observe(batch, output)
    return committed


def _progress_of_producers(table: SequenceTable, in_flight_step: InFlightStep) -> list[tuple[RequestKey, int]]:
    """(key, tokens computed) of each "producer" request of the step whose prompt is not done yet."""
    batch = in_flight_step.batch
    unfinished = (~batch.sample & (in_flight_step.positions >= 0)).nonzero()[0].tolist()
    progress = [(table.running[in_flight_step.positions[index]], index) for index in unfinished]
    done = (batch.num_computed + batch.num_scheduled).tolist()
    return [(sequence.request.key, done[index]) for sequence, index in progress if sequence.kv == "producer"]


def _append_tokens(state: SchedulerState, batch: Batch, positions: Positions, output: StepOutput) -> Committed:
    """Applies what was sampled. `positions`, int32 [B]: where the batch's sequences are now, -1 where one has left."""
    table = state.table
    num_columns = output.token_ids.shape[1]
    results = Results(np.empty((loops.NUM_RESULT_LINES, len(positions)), np.int32))
    request_numbers: Int64 = np.empty(len(positions), np.int64)
    token_ids = Flat(np.empty(len(positions) * num_columns, np.int32))
    sampled = Sampled(np.ascontiguousarray(output.token_ids, np.int32))
    num_sampled, stops = np.ascontiguousarray(output.counts, np.int32), _own_stops(state, positions, sampled)
    count, num_tokens, num_fresh, num_complete = loops.append(
        table.state,
        table.request_numbers,
        table.token_ids,
        positions,
        num_sampled,
        sampled,
        stops,
        state.eos_token_ids,
        results,
        request_numbers,
        token_ids,
    )
    at, counts = results[loops.POSITION, :count], results[loops.COUNT, :count]
    attempts, offsets = results[loops.ATTEMPT_OF, :count], results[loops.OFFSET, :count]
    committed = Committed(
        batch=batch,
        request_numbers=request_numbers[:count],
        attempts=attempts,
        offsets=offsets,
        counts=counts,
        token_ids=token_ids[:num_tokens],
    )
    if output.logprobs:
        _note_logprobs(committed, [output.logprobs.get(index) for index in results[loops.INDEX, :count].tolist()])
    if num_fresh:
        _note_first(state, committed, at, results[loops.FIRST, :num_fresh].tolist())
    if state.proposer is not None:
        table.computed[at] = table.tokens[at] - 1
        _propose(state, state.proposer, np.setdiff1d(at, results[loops.COMPLETE, :num_complete]))
    if num_complete:
        _finish(
            state,
            committed,
            results[loops.COMPLETE, :num_complete].tolist(),
            results[loops.STOPPED, :num_complete].tolist(),
        )
    return committed


def _own_stops(state: SchedulerState, positions: Positions, sampled: Sampled) -> Stops:
    """How many sampled tokens each sequence has up to the first of its own stop tokens, int32 [B]; NEVER if none
    of them is one.
    """
    table = state.table
    stops = Stops(table.no_stops[: len(positions)])
    if not table.num_own_stops:
        return stops
    stops = Stops(stops.copy())
    for index, position in enumerate(positions.tolist()):
        if position >= 0 and (own := table.running[position].stop_token_ids):
            stops[index] = next(
                (num for num, token_id in enumerate(sampled[index].tolist(), 1) if token_id in own), NEVER
            )
    return stops


def _note_logprobs(committed: Committed, logprobs: list[list[TokenLogprobs] | None]) -> None:
    for index, values in enumerate(logprobs):
        if values is not None:
            request_number, attempt, offset = (
                int(committed.request_numbers[index]),
                int(committed.attempts[index]),
                int(committed.offsets[index]),
            )
            kept = values[: int(committed.counts[index])]
            committed.logprobs += [
                Logprobs(request_number, attempt, offset + ahead, value) for ahead, value in enumerate(kept)
            ]


def _note_first(state: SchedulerState, committed: Committed, positions: Int32, indices: list[int]) -> None:
    """Notes that the entries `indices` of `committed` begin their answers here. `positions` has those of all entries.

    The entry of a consumer gets, in front, the token that its prefill engine sampled.
    """
    table = state.table
    where: list[int] = []
    tokens: list[int] = []
    for index in indices:
        sequence = table.running[positions[index]]
        committed.first.append(sequence.request.key)
        if sequence.first_token_id is not None:
            where.append(index)
            tokens.append(sequence.first_token_id)
            committed.offsets[index] -= 1
            committed.counts[index] += 1
            sequence.first_token_id = None
            if (values := sequence.first_logprobs) is not None:
                request_number, attempt, offset = (
                    int(committed.request_numbers[index]),
                    int(committed.attempts[index]),
                    int(committed.offsets[index]),
                )
                committed.logprobs.append(Logprobs(request_number, attempt, offset, values))
    if where:
        starts = np.cumsum(committed.counts) - committed.counts
        committed.token_ids = np.insert(committed.token_ids, starts[where] - np.arange(len(where)), tokens).astype(
            np.int32
        )


def _propose(state: SchedulerState, proposer: Proposer, positions: Int32) -> None:
    """Asks for drafts and puts them behind the known tokens. The room for drafts is one less than the tokens that the
    answer still lacks."""
    table = state.table
    rows, num_tokens = table.row[positions].tolist(), table.tokens[positions]
    rooms = np.clip(table.limit[positions] - num_tokens - 1, 0, state.config.num_speculative_tokens)
    num_drafts = []
    for position, row, known, room in zip(positions.tolist(), rows, num_tokens.tolist(), rooms.tolist(), strict=True):
        drafts = proposer.propose(table.running[position].request.key, table.token_ids[row, :known], room)
        drafts = drafts[: state.config.max_model_len - known]  # a proposer may ignore the room
        if drafts:
            table.token_ids[row, known : known + len(drafts)] = drafts
        num_drafts.append(len(drafts))
    table.goal[positions] = np.minimum(num_tokens + np.array(num_drafts, np.int32), table.cap[positions])


def _finish(state: SchedulerState, committed: Committed, positions: list[int], stopped: list[int]) -> None:
    """Takes complete sequences out. The blocks of "producer" sequences pass to whoever reads `committed`."""
    table = state.table
    for position, stop in zip(positions, stopped, strict=True):
        sequence = table.running[position]
        key, blocks = sequence.request.key, table.blocks_of(position)
        reason: FinishReason = "stop" if stop else "length"
        del state.live[key]
        if sequence.kv == "producer":
            complete = stop or int(table.tokens[position]) >= sequence.limit
            first = int(table.known(position)[-1])
            values = next(
                (
                    entry.values
                    for entry in committed.logprobs
                    if entry.request_number == sequence.request.request_number
                ),
                None,
            )
            committed.prompts.append(PromptDone(key, first, blocks.tolist(), reason if complete else None, values))
            state.blocks.hand_over(len(blocks))
        else:
            committed.finished.append(Finished(key, sequence.request.request_number, reason))
            state.blocks.release(blocks)
    state.leave(positions)
