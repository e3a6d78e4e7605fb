"""The loops of one step over the running sequences: who gets tokens and blocks, what the batch is, what was sampled.

Arrays of the table and of the block manager are as in loops_sequences.py and loops_blocks.py. Those of a batch of B
sequences are:

- `Scheduled` int32 [NUM_SCHEDULED_LINES, B]: what `launch` tells of the batch.
- `Results` int32 [NUM_RESULT_LINES, B]: what `append` tells of it.
- `Sampled` int32 [B, K]: the tokens that were sampled for each sequence.
- `Stops` int32 [B]: how many sampled tokens there are up to the first of the sequence's own stop tokens; more than K
  where none of them is one.
- `Flat` int32 [B K]: the tokens that were kept, sequence by sequence.
"""

from functools import cache
from typing import NewType

import numpy as np

from engine.scheduler import loops_sequences
from engine.scheduler.loops_blocks import NUM_BLANK, NUM_CACHED, NUM_COUNTS, Blocks, Counts, Index, Log, pop
from engine.scheduler.loops_sequences import (
    ALLOWED,
    ATTEMPT,
    BASE,
    CAP,
    CAPACITY,
    COMPUTED,
    FRESH,
    GOAL,
    GUIDED,
    IGNORE_EOS,
    LIMIT,
    NUM,
    NUM_LINES,
    PRODUCER,
    ROW,
    TOKENS,
    BlockTables,
    Positions,
    RequestNumbers,
    State,
    TokenIds,
)
from jit.loops_compile import compiled_loop, one_compiles, put_compiled
from protocol.arrays import Bool, Int32, Int64

SOURCES = (__file__, *loops_sequences.SOURCES)

Scheduled = NewType("Scheduled", Int32)
Results = NewType("Results", Int32)
Sampled = NewType("Sampled", Int32)
EosTokenIds = NewType("EosTokenIds", Int32)
Stops = NewType("Stops", Int32)
Flat = NewType("Flat", Int32)

AT_POSITION, AT_ROW, NUM_TOKENS, NUM_BEFORE, NUM_AHEAD = range(5)
NUM_SCHEDULED_LINES = 5

INDEX, POSITION, ATTEMPT_OF, OFFSET, COUNT = range(5)
FIRST, COMPLETE, STOPPED = 5, 6, 7
"""These lines are filled from the front, independently of the lines above."""
NUM_RESULT_LINES = 8

LACKING = -1
STARVED = -2


@compiled_loop(SOURCES)
def place(
    blocks: Blocks,
    index: Index,
    counts: Counts,
    log: Log,
    state: State,
    block_tables: BlockTables,
    goal_line: int,
    block_size: int,
    count: int,
    threshold: int,
    budget: int,
) -> int:
    """Gives each of the first `count` sequences tokens and the blocks for them.

    Writes the tokens to NUM: each sequence gets them up to its `goal_line` (GOAL or ALLOWED), but at most `threshold`,
    and all together get at most `budget`. Returns what is left of the budget. Returns LACKING if there are not enough
    free blocks, and STARVED if a sequence would get no token for want of budget; then nobody has got a block.
    """
    row, goal, computed, capacity, num = state[ROW], state[goal_line], state[COMPUTED], state[CAPACITY], state[NUM]
    wanted = 0
    for i in range(count):
        num[i] = min(goal[i] - computed[i], threshold, budget)
        budget -= num[i]
        lacking = computed[i] + num[i] - capacity[i]
        if lacking > 0:
            wanted += (lacking + block_size - 1) // block_size
    last = count - 1 if budget == 0 else -1
    while last >= 0 and not num[last]:
        if goal[last] > computed[last]:
            return STARVED
        last -= 1
    if wanted > counts[NUM_BLANK] + counts[NUM_CACHED]:
        return LACKING
    for i in range(count):
        while capacity[i] < computed[i] + num[i]:
            block_tables[row[i], capacity[i] // block_size] = pop(blocks, index, counts, log)
            capacity[i] += block_size
    return budget


@compiled_loop(SOURCES)
def ration(state: State, count: int, threshold: int, budget: int, next_chunk: int) -> None:
    """Writes to ALLOWED how far each of the first `count` sequences may go where `budget` is not enough for all goals.

    First, each sequence that lacks one token, drafts aside, gets this one and no more. Then all sequences that want
    more get one more each, round by round in running order, for as long as one of those wants a draft. What is left
    goes to prompts in running order. Drafts leave `next_chunk` tokens alone, without which nobody new would get in, if
    there are as many.
    """
    tokens, goal, computed, allowed = state[TOKENS], state[GOAL], state[COMPUTED], state[ALLOWED]
    for i in range(count):
        is_answer = goal[i] > computed[i] and computed[i] + 1 >= tokens[i]
        allowed[i] = computed[i] + is_answer
        budget -= is_answer
    if next_chunk > budget:
        next_chunk = 0
    budget -= next_chunk
    drafting = True
    while drafting and budget > 0:
        drafting = False
        for i in range(count):
            if budget > 0 and allowed[i] - computed[i] < min(goal[i] - computed[i], threshold):
                allowed[i] += 1
                budget -= 1
                drafting |= computed[i] + 1 >= tokens[i]
    budget += next_chunk
    for i in range(count):
        if computed[i] + 1 < tokens[i]:
            more = min(min(goal[i] - computed[i], threshold) - (allowed[i] - computed[i]), budget)
            allowed[i] += more
            budget -= more


@compiled_loop(SOURCES)
def launch(state: State, drafted: int, scheduled: Scheduled, sample: Bool) -> int:
    """Counts NUM tokens of each sequence as computed, and describes the batch that computes them.

    Writes for each sequence that has tokens whether it samples, and its position, row, tokens, tokens computed before,
    and tokens that are not known yet. `sample` and `scheduled` have room for all that run. `drafted` is 1 if all tokens
    up to the goal are there. Returns the number B of sequences in the batch.

    What comes next under a grammar depends on the token that is being sampled: such a sequence goes on when that token
    is known (`append`), and others a step earlier.
    """
    row, tokens, goal, computed, cap, num, guided = (
        state[ROW],
        state[TOKENS],
        state[GOAL],
        state[COMPUTED],
        state[CAP],
        state[NUM],
        state[GUIDED],
    )
    count = 0
    for i in range(len(sample)):
        if not num[i]:
            continue
        target = computed[i] + num[i]
        scheduled[AT_POSITION, count], scheduled[AT_ROW, count] = i, row[i]
        scheduled[NUM_TOKENS, count], scheduled[NUM_BEFORE, count] = num[i], computed[i]
        scheduled[NUM_AHEAD, count] = max(target - tokens[i], 0)
        computed[i] = target
        if drafted:
            sample[count] = target >= tokens[i]
        else:
            sample[count] = target == goal[i]
            if target == goal[i] and not guided[i]:
                goal[i] = min(goal[i] + 1, cap[i])
        count += 1
    return count


@compiled_loop(SOURCES)
def append(
    state: State,
    request_numbers: RequestNumbers,
    token_ids: TokenIds,
    positions: Positions,
    num_sampled: Int32,
    sampled: Sampled,
    stops: Stops,
    eos_token_ids: EosTokenIds,
    results: Results,
    numbers_of: Int64,
    flat: Flat,
) -> tuple[int, int, int, int]:
    """Makes sampled tokens known, up to the end of each answer. Line i of `sampled` has `num_sampled[i]` of them.

    For each of the R <= B sequences that got tokens, `results` gets its index in the batch, position, attempt, offset
    and number of tokens kept, `numbers_of` its request number, and `flat` its tokens. FIRST lists which of the R got
    their first token, COMPLETE the positions of complete sequences, STOPPED whether a stop token ended them. Returns R
    and the numbers of tokens kept, of first tokens and of complete sequences."""
    row, tokens, limit, base, goal, cap = (
        state[ROW],
        state[TOKENS],
        state[LIMIT],
        state[BASE],
        state[GOAL],
        state[CAP],
    )
    attempt, fresh, ignore_eos, producer = state[ATTEMPT], state[FRESH], state[IGNORE_EOS], state[PRODUCER]
    count, num_flat, num_fresh, num_complete = 0, 0, 0, 0
    for i in range(len(positions)):
        at = positions[i]
        if at < 0 or not num_sampled[i]:
            continue
        before, kept, stopped = tokens[at], 0, False
        room = min(num_sampled[i], limit[at] - before, sampled.shape[1])
        while kept < room and not stopped:
            token = sampled[i, kept]
            token_ids[row[at], before + kept] = flat[num_flat + kept] = token
            kept += 1
            if not ignore_eos[at]:
                for end in eos_token_ids:
                    stopped |= token == end
            stopped |= stops[i] == kept
        tokens[at] = before + kept
        goal[at] = max(goal[at], min(tokens[at], cap[at]))
        if fresh[at]:
            fresh[at] = 0
            results[FIRST, num_fresh] = count
            num_fresh += 1
        if stopped or producer[at] or tokens[at] >= limit[at]:
            results[COMPLETE, num_complete], results[STOPPED, num_complete] = at, stopped
            num_complete += 1
        results[INDEX, count], results[POSITION, count], results[ATTEMPT_OF, count] = i, at, attempt[at]
        results[OFFSET, count], results[COUNT, count] = base[at] + before, kept
        numbers_of[count] = request_numbers[at]
        num_flat += kept
        count += 1
    return count, num_flat, num_fresh, num_complete


@cache
def compile_all() -> None:
    """Calls every loop once, with nothing to do."""
    line, plane, space = (np.zeros((0,) * num_axes, np.int32) for num_axes in (1, 2, 3))
    state, numbers = State(np.zeros((NUM_LINES, 0), np.int32)), RequestNumbers(np.zeros(0, np.int64))
    blocks, index, counts, log = Blocks(plane), Index(plane), Counts(np.zeros(NUM_COUNTS, np.int64)), Log(space)
    positions, sampled, stops, results, flat = Positions(line), Sampled(plane), Stops(line), Results(plane), Flat(line)
    token_ids, tables, ends = TokenIds(plane), BlockTables(plane), EosTokenIds(line)
    put_compiled(globals())
    with one_compiles(SOURCES):
        place(blocks, index, counts, log, state, tables, GOAL, 1, 0, 0, 0)
        ration(state, 0, 0, 0, 0)
        launch(state, 0, Scheduled(plane), np.zeros(0, np.bool_))
        append(state, numbers, token_ids, positions, line, sampled, stops, ends, results, numbers, flat)
