"""The loops over running sequences, compiled like those over blocks: a step costs what its sequences are, and not what
numpy calls cost.

Blocks, Index, Counts, Log: as in loops_blocks.py. Each kind of array has a type of its own here too:

- `State` int32 [NUM_LINES, seats]: the lines below, with an entry per position, as `SequenceTable` describes them.
- `RequestNumbers` int64 [seats]: by position.
- `TokenIds` int32 [rows, n], `TokenBlocks` (the same cut into blocks) [rows, n, block_size], `BlockTables` [rows, n],
  `Chains` [rows, n + 1, 4]: by row.
- `Positions` int32 [B]: of the sequences of a batch, ascending; -1: has left.
- `Scheduled` int32 [NUM_SCHEDULED_LINES, B], `Results` int32 [NUM_RESULT_LINES, B]: what `launch` and `append` tell of
  a batch.
"""

from functools import cache
from typing import NewType

import numpy as np

from engine.loops_compile import compiled_loop, one_compiles, put_compiled
from engine.scheduler import loops_blocks, loops_hash
from engine.scheduler.loops_blocks import (
    NUM_BLANK,
    NUM_CACHED,
    NUM_COUNTS,
    BlockIds,
    Blocks,
    Counts,
    Index,
    Log,
    name_block,
    pop,
)
from engine.scheduler.loops_hash import NUM_WORDS, Chain, hash_block
from protocol.arrays import Bool, Int32, Int64, UInt64
from protocol.block_hash import HASH_WORDS

SOURCES = (__file__, *loops_blocks.SOURCES, *loops_hash.SOURCES)

State = NewType("State", Int32)
RequestNumbers = NewType("RequestNumbers", Int64)
TokenIds = NewType("TokenIds", Int32)
TokenBlocks = NewType("TokenBlocks", Int32)
BlockTables = NewType("BlockTables", Int32)
Chains = NewType("Chains", Int32)
Positions = NewType("Positions", Int32)
Scheduled = NewType("Scheduled", Int32)
Results = NewType("Results", Int32)
Sampled = NewType("Sampled", Int32)
"""[B, K] tokens of each sequence of a batch."""
EosTokenIds = NewType("EosTokenIds", Int32)
Stops = NewType("Stops", Int32)
"""[B] number of the sampled tokens up to the first of its own stop tokens; beyond K: none is."""
Flat = NewType("Flat", Int32)
"""[B K] the tokens that were kept, sequence by sequence."""

ROW, TOKENS, GOAL, COMPUTED, CAPACITY, LIMIT, CAP = range(7)
EDGE, CHAINED, BASE, ATTEMPT, FRESH, IGNORE_EOS, PRODUCER = range(7, 14)
NUM_OWN_LINES = 14
"""Those a sequence brings along and takes with it; the others are written anew by each step."""
NUM, ALLOWED = 14, 15
NUM_LINES = 16

AT_POSITION, AT_ROW, NUM_TOKENS, NUM_BEFORE, NUM_AHEAD = range(5)
NUM_SCHEDULED_LINES = 5

INDEX, POSITION, ATTEMPT_OF, OFFSET, COUNT = range(5)
FIRST, COMPLETE, STOPPED = 5, 6, 7
"""Filled from the front, independently of the lines above."""
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
    """Writes to NUM the tokens of the first `count` sequences, each up to `goal_line` (GOAL or ALLOWED) and up to
    `threshold`, together up to `budget`, and gives them the blocks for these. Returns what is left of the budget;
    LACKING: blocks, STARVED: some would get no token for want of budget. Then nobody got a block."""
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
    """Writes to ALLOWED how far each of the first `count` sequences may go where `budget` is not enough for all of
    their goals.

    First the one token of each that lacks, drafts aside, no more than that. Then, while any of these wants a draft, one
    more token each, round by round in running order, for all that want more. What is left goes to prompts in running
    order. Drafts also leave alone the `next_chunk` tokens without which nobody new would get in, if there are as many.
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
def cache_full_blocks(
    blocks: Blocks,
    index: Index,
    counts: Counts,
    log: Log,
    state: State,
    block_tables: BlockTables,
    known: TokenBlocks,
    chains: Chains,
    first: int,
    end: int,
    words: UInt64,
) -> None:
    """Makes the blocks findable that NUM more tokens, for the sequences at positions `first` to `end` - 1, fill with
    `known` tokens.

    Hashes not known yet are added to `chains`.
    """
    row, tokens, computed, edge, chained, num = (
        state[ROW],
        state[TOKENS],
        state[COMPUTED],
        state[EDGE],
        state[CHAINED],
        state[NUM],
    )
    size = known.shape[2]
    for i in range(first, end):
        filled = min(computed[i] + num[i], tokens[i])
        while edge[i] <= filled:
            block, hashes = edge[i] // size, chains[row[i]]
            if edge[i] > chained[i]:
                hash_block(hashes, block, known[row[i], block - 1], words)
                chained[i] = edge[i]
            name_block(blocks, index, counts, log, block_tables[row[i], block - 1], hashes, block)
            edge[i] += size


@compiled_loop(SOURCES)
def extend(chain: Chain, num_known: int, tokens: Int32, block_size: int, words: UInt64) -> None:
    """Fills up a chain, whose first `num_known` hashes are there, for blocks of `tokens`."""
    for i in range(num_known, len(chain)):
        hash_block(chain, i, tokens[(i - 1) * block_size : i * block_size], words)


@compiled_loop(SOURCES)
def launch(state: State, drafted: int, scheduled: Scheduled, sample: Bool) -> int:
    """Counts NUM tokens of each sequence as computed, `sample` and `scheduled` having room for all that run.

    Writes for each that has tokens whether it samples, and its position, row, tokens, those computed before, and how
    many of the tokens are not known yet. Returns their number B. `drafted`: 1 if all tokens up to the goal are there.
    """
    row, tokens, goal, computed, cap, num = (
        state[ROW],
        state[TOKENS],
        state[GOAL],
        state[COMPUTED],
        state[CAP],
        state[NUM],
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
            if target == goal[i]:
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
    """Makes sampled tokens known, up to the end of each answer.

    `sampled`: valid in the first `num_sampled[i]` columns of each line. Writes for each of the R <= B sequences that
    got tokens its index in the batch, position, attempt, offset and the number of tokens kept, its request_number to
    `numbers_of`, and all kept tokens to `flat`. Then which of the R got their FIRST token, the positions of those that
    are COMPLETE, and whether a stop token ended them (STOPPED). Returns R, how many tokens were kept, are first ones,
    and how many sequences are complete.
    """
    row, tokens, limit, base = state[ROW], state[TOKENS], state[LIMIT], state[BASE]
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


@compiled_loop(SOURCES)
def enter(
    state: State,
    position: int,
    numbers: tuple[int, ...],
    token_ids: TokenIds,
    block_tables: BlockTables,
    chains: Chains,
    tokens: Int32,
    blocks: BlockIds,
    chain: Chain,
) -> None:
    """Writes `numbers`, one for each of a sequence's own lines, to a position, and known tokens, blocks and hashes to
    its row.
    """
    row = numbers[ROW]
    for line in range(NUM_OWN_LINES):
        state[line, position] = numbers[line]
    for i in range(len(tokens)):
        token_ids[row, i] = tokens[i]
    for i in range(len(blocks)):
        block_tables[row, i] = blocks[i]
    for i in range(len(chain)):
        for word in range(HASH_WORDS):
            chains[row, i, word] = chain[i, word]


@compiled_loop(SOURCES)
def close_gaps(state: State, request_numbers: RequestNumbers, gone: Int32, count: int) -> None:
    """The first `count` positions (of a sequence's own lines of `state`, and of `request_numbers`) move up over those
    in `gone`, which ascend.
    """
    for i in range(len(gone)):
        last = gone[i + 1] if i + 1 < len(gone) else count
        for at in range(gone[i] + 1, last):
            request_numbers[at - i - 1] = request_numbers[at]
    for line in range(NUM_OWN_LINES):
        for i in range(len(gone)):
            last = gone[i + 1] if i + 1 < len(gone) else count
            for at in range(gone[i] + 1, last):
                state[line, at - i - 1] = state[line, at]


@compiled_loop(SOURCES)
def follow(positions: Positions, gone: Int32) -> None:
    """Positions (ascending; -1: left before) after those in `gone`, which ascend, have left."""
    num_before = 0
    for i in range(len(positions)):
        if positions[i] < 0:
            continue
        while num_before < len(gone) and gone[num_before] < positions[i]:
            num_before += 1
        if num_before < len(gone) and gone[num_before] == positions[i]:
            positions[i] = -1
        else:
            positions[i] -= num_before


@cache
def compile_all() -> None:
    """Calls every loop once, with nothing to do."""
    line, plane, space = (np.zeros((0,) * num_axes, np.int32) for num_axes in (1, 2, 3))
    state, words = State(np.zeros((NUM_LINES, 0), np.int32)), np.zeros(NUM_WORDS, np.uint64)
    request_numbers = RequestNumbers(np.zeros(0, np.int64))
    blocks, index, counts, log = Blocks(plane), Index(plane), Counts(np.zeros(NUM_COUNTS, np.int64)), Log(space)
    token_ids, tables, chains, positions = TokenIds(plane), BlockTables(plane), Chains(space), Positions(line)
    results = Results(plane)
    put_compiled(globals())
    with one_compiles(SOURCES):
        place(blocks, index, counts, log, state, tables, GOAL, 1, 0, 0, 0)
        ration(state, 0, 0, 0, 0)
        cache_full_blocks(blocks, index, counts, log, state, tables, TokenBlocks(space), chains, 0, 0, words)
        extend(Chain(plane), 0, line, 1, words)
        launch(state, 0, Scheduled(plane), np.zeros(0, np.bool_))
        append(
            state,
            request_numbers,
            token_ids,
            positions,
            line,
            Sampled(plane),
            Stops(line),
            EosTokenIds(line),
            results,
            request_numbers,
            Flat(line),
        )
        numbers = (0,) * NUM_OWN_LINES
        enter(
            State(np.zeros((NUM_LINES, 1), np.int32)),
            0,
            numbers,
            token_ids,
            tables,
            chains,
            line,
            BlockIds(line),
            Chain(plane),
        )
        close_gaps(state, request_numbers, line, 0)
        follow(positions, line)
