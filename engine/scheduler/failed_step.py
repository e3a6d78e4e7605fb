"""What has to be forgotten when the runner could not execute a step."""

from engine.scheduler.state import SchedulerState
from protocol.errors import ProtocolError
from protocol.messages import RequestKey


def forget_failed_step(state: SchedulerState) -> list[RequestKey]:
    """Takes the oldest step in flight back. The blocks that it and later steps would have written are no longer
    findable. A sequence whose blocks it would have copied to the host has lost its KV.

    Returns the requests that are spoilt: those in flight, and those that have reserved a block that was still to be
    computed. Raises ProtocolError if no step is in flight.
    """
    table, size = state.table, state.config.block_size
    if not table.in_flight:
        raise ProtocolError("a failed step without a batch in flight")
    spoilt: dict[RequestKey, None] = {}
    blocks: set[int] = set()
    for in_flight_step in table.in_flight:
        batch = in_flight_step.batch
        for row, start, num in zip(
            batch.rows.tolist(), batch.num_computed.tolist(), batch.num_scheduled.tolist(), strict=True
        ):
            blocks.update(batch.block_tables[row, start // size : -(-(start + num) // size)].tolist())
        if batch.swap_in is not None:
            blocks.update(batch.swap_in[:, 1].tolist())
        if batch.swap_out is not None:
            _lose_copies(state, set(batch.swap_out[:, 1].tolist()))
        positions = [position for position in in_flight_step.positions.tolist() if position >= 0]
        spoilt.update(dict.fromkeys(table.running[position].request.key for position in positions))
    state.blocks.forget(list(blocks))
    for key, sequence in state.live.items():
        if not blocks.isdisjoint(sequence.blocks.tolist()):
            spoilt[key] = None
    batch = table.in_flight.popleft().batch
    state.blocks.step_committed()
    table.committed(batch.step)
    return list(spoilt)


def _lose_copies(state: SchedulerState, host_blocks: set[int]) -> None:
    """Sequences that own any of these host blocks have to compute their KV again."""
    for sequence in state.live.values():
        if not host_blocks.isdisjoint(sequence.host_blocks):
            sequence.num_lost = sequence.num_swapped
            state.drop_swapped(sequence)
