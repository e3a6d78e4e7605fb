"""The first part of a schedule: running sequences get tokens and blocks, and some are evicted when blocks lack.

Every running answer has one token in every step, since `max_num_batched_tokens` is never below `max_num_seqs`. Beyond
that, prompts get tokens in running order, but drafts get them evenly and shut nobody out (loops_step.py:ration). Blocks
go to all in running order, for drafts too.
"""

import numpy as np

from engine.scheduler import loops_step as loops
from engine.scheduler.loops_hash import Chain
from engine.scheduler.loops_sequences import ALLOWED, GOAL
from engine.scheduler.preemption import Victim, choose_mode
from engine.scheduler.sequence_table import NEVER
from engine.scheduler.state import SchedulerState
from protocol.arrays import Int32


def step_budget(state: SchedulerState, num_promised: int) -> int:
    """Tokens that this step may compute. `num_promised` of them are for arrived sequences that will be seated."""
    config, table = state.config, state.table
    if not config.pad_with_prefill:
        return config.max_num_batched_tokens
    num_decodes = int(np.count_nonzero(table.answering())) + num_promised
    # Not the size that equals the decodes: prompts must always move on.
    sizes = [size for size in config.cuda_graph_sizes if size > num_decodes]
    return min(config.max_num_batched_tokens, sizes[0]) if num_decodes and sizes else config.max_num_batched_tokens


def place_running(state: SchedulerState, budget: int, *, alone: bool) -> int | None:
    """Gives each running sequence, in admission order, tokens (`table.num`) and the blocks for them. `alone` is True
    where the engine has only one sequence at all.

    Returns what is left of the budget. Returns None, and changes nothing, if a sequence would have to be evicted while
    a step is in flight.
    """
    table, config = state.table, state.config
    threshold = config.long_prefill_token_threshold if config.long_prefill_token_threshold and not alone else NEVER
    goal = GOAL if state.proposer is None else _ration(state, budget, threshold)
    left = _place(state, goal, budget, threshold)
    if left == loops.STARVED:
        goal = _ration(state, budget, threshold)
        left = _place(state, goal, budget, threshold)
    if left >= 0:
        return left
    if table.in_flight:
        return None
    if config.scheduling_policy == "priority":
        return _place_by_priority(state, table.state[goal], budget, threshold)
    return _place_evicting_newest(state, budget)


def _place(state: SchedulerState, goal: int, budget: int, threshold: int) -> int:
    table, size = state.table, state.config.block_size
    return loops.place(*state.blocks.arrays, table.state, table.block_tables, goal, size, len(table), threshold, budget)


def _ration(state: SchedulerState, budget: int, threshold: int) -> int:
    """Writes goals for which the budget is enough, so that every sequence gets its share. Returns their line."""
    table, head = state.table, state.waiting.head() if state.has_seat() else None
    next_chunk = 0 if head is None else 1 if state.config.enable_chunked_prefill else len(head.tokens)
    loops.ration(table.state, len(table), threshold, budget, next_chunk)
    return ALLOWED


def _place_evicting_newest(state: SchedulerState, budget: int) -> int:
    """Under fcfs the newest sequence is evicted, which may be the one that lacks blocks. No victim has got blocks yet,
    so what the others got stays theirs. Returns what is left of the budget.
    """
    table = state.table
    end = count = len(table)
    num = table.num[:count]
    lacking = table.computed[:count] + num > table.capacity[:count]
    for position in lacking.nonzero()[0].tolist():
        want = _want(state, position, int(num[position]))
        while position < end and want > state.blocks.num_free:
            end -= 1
            if end > 0:
                preempt(state, end)
                continue
            last = _place_last(state, 0, int(num[0]))
            if last is not None:
                num[0], end = last, 1
            break
        else:
            if position < end:
                _grow(state, position, want)
                continue
        break
    if end < count:
        state.leave(range(end, count))
    return budget - int(num[:end].sum())


def _place_by_priority(state: SchedulerState, goal: Int32, budget: int, threshold: int) -> int:
    """Under priority the sequence with the worst (priority, arrival) is evicted, the latest one among equals. The
    tokens that it got in this step return to the budget. Returns what is left of the budget.
    """
    table, count = state.table, len(state.table)
    given = dict.fromkeys(range(count), 0)
    """Tokens by position of the sequences that stay, in running order."""
    for position in range(count):
        if position not in given:
            continue
        num = min(int(goal[position] - table.computed[position]), threshold, budget)
        while num > 0 and _want(state, position, num) > state.blocks.num_free:
            if len(given) == 1:
                last = _place_last(state, position, num)
                num = last or 0
                if last is None:
                    del given[position]
                break
            victim = max(given, key=lambda candidate: table.running[candidate].queue_key)
            preempt(state, victim)
            budget += given.pop(victim)
            if victim == position:
                num = 0
        if num > 0:
            _grow(state, position, _want(state, position, num))
            given[position] = num
            budget -= num
    if len(given) < count:
        state.leave([position for position in range(count) if position not in given])
    table.num[: len(given)] = list(given.values())
    return budget


def _place_last(state: SchedulerState, position: int, num: int) -> int | None:
    """The only sequence left in the batch lacks blocks. It takes what fits, or waits while others own blocks.
    Returns its tokens.

    Returns None if it has to leave: it is evicted if an arrived sequence would else have no seat, and it ends if it
    owns the whole pool.
    """
    table, size = state.table, state.config.block_size
    capacity = int(table.capacity[position])
    fits = capacity + state.blocks.num_free * size - int(table.computed[position])
    if fits > 0:
        num = min(num, fits)
        _grow(state, position, _want(state, position, num))
        return num
    if state.arrived and state.config.max_num_seqs == 1:
        preempt(state, position)
        return None
    if state.blocks.num_owned > capacity // size:
        return 0
    key = table.running[position].request.key
    state.blocks.release(table.blocks_of(position))
    del state.live[key]
    state.events.ended.append((key, "length"))
    return None


def preempt(state: SchedulerState, position: int) -> None:
    """Takes a sequence's blocks, and puts it in the queue or gives it back to the router. Its tokens stay. No step may
    be in flight. The caller unseats the sequence when it no longer needs the positions.
    """
    table = state.table
    sequence, blocks = table.running[position], table.blocks_of(position)
    key, computed, num_tokens = sequence.request.key, int(table.computed[position]), int(table.tokens[position])
    filled, needed = blocks[: state.num_blocks(computed)], state.num_blocks(num_tokens)
    choice = choose_mode(
        state.config.preemption,
        Victim(num_tokens, computed, len(filled), len(table)),
        state.costs,
        num_host_free=state.host.num_free,
        has_room=needed <= state.prefill_room_blocks and num_tokens <= state.prefill_max_tokens,
    )
    state.blocks.release(blocks)
    state.events.preempted.append(key)
    state.events.choices.append(choice)
    state.costs.recompute_tried |= choice.mode == "recompute"
    if choice.mode == "remote":
        state.prefill_room_blocks -= needed
        del state.live[key]
        state.events.returned.append(key)
        return
    if choice.mode == "swap":
        sequence.host_blocks, sequence.num_swapped = state.host.allocate(len(filled)), computed
        state.swap_out += zip(filled.tolist(), sequence.host_blocks, strict=True)
    else:
        sequence.num_lost = computed
    sequence.tokens, sequence.chain = table.known(position).copy(), Chain(table.chain_of(position).copy())
    sequence.kv = "local" if sequence.kv == "consumer" else sequence.kv
    state.waiting.push_preempted(sequence)


def _want(state: SchedulerState, position: int, num: int) -> int:
    """How many blocks a sequence lacks for `num` more tokens."""
    lacking = int(state.table.computed[position]) + num - int(state.table.capacity[position])
    return max(0, state.num_blocks(lacking))


def _grow(state: SchedulerState, position: int, count: int) -> None:
    if count:
        state.table.append_blocks(position, state.blocks.allocate(count))
