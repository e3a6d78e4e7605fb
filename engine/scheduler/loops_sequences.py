"""The loops over running sequences, compiled like those over blocks: a step costs what its sequences are, and not what numpy calls cost.

Arrays [seats] hold one entry per position, as `SequenceTable` describes them; `block_tables`, `token_ids`, `known` and `chains` have a
line per row. blocks, index, counts, log: as in loops_blocks.py. Arrays [B] have an entry per sequence of a batch.
"""

from functools import cache

import numpy as np

from engine.loops_compile import compiled_loop, one_compiles, put_compiled
from engine.scheduler import loops_blocks, loops_hash
from engine.scheduler.loops_blocks import NUM_BLANK, NUM_CACHED, NUM_COUNTS, name_block, pop
from engine.scheduler.loops_hash import NUM_WORDS, hash_block
from protocol.arrays import Bool, Int32, Int64, UInt64
from protocol.block_hash import HASH_WORDS

SOURCES = (__file__, *loops_blocks.SOURCES, *loops_hash.SOURCES)

LACKING = -1
STARVED = -2

NUM_LINES = 14
"""Of a table's `state` [NUM_LINES, seats]: the numbers of a sequence, its row first."""


@compiled_loop(SOURCES)
def place(
    blocks: Int32,
    index: Int32,
    counts: Int64,
    log: Int32,
    row: Int32,
    goal: Int32,
    computed: Int32,
    capacity: Int32,
    block_tables: Int32,
    block_size: int,
    num: Int32,
    count: int,
    threshold: int,
    budget: int,
) -> int:
    """Writes to `num` the tokens of the first `count` sequences, each up to its goal and up to `threshold`, together up to `budget`,
    and gives them the blocks for these. Returns what is left of the budget; LACKING: blocks, STARVED: some would get no token for want of
    budget. Then nobody got a block."""
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
def ration(tokens: Int32, goal: Int32, computed: Int32, allowed: Int32, count: int, threshold: int, budget: int, next_chunk: int) -> None:
    """Writes to `allowed` how far each of the first `count` sequences may go where `budget` is not enough for all of their goals.

    First the one token of each that lacks, drafts aside, no more than that. Then, while any of these wants a draft, one more token each,
    round by round in running order, for all that want more. What is left goes to prompts in running order. Drafts also leave alone the
    `next_chunk` tokens without which nobody new would get in, if there are as many.
    """
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
def name_filled(
    blocks: Int32,
    index: Int32,
    counts: Int64,
    log: Int32,
    row: Int32,
    tokens: Int32,
    computed: Int32,
    edge: Int32,
    chained: Int32,
    block_tables: Int32,
    known: Int32,
    chains: Int32,
    num: Int32,
    first: int,
    end: int,
    words: UInt64,
) -> None:
    """Makes the blocks findable that `num` more tokens, for the sequences at positions `first` to `end` - 1, fill with known tokens.

    `known` [rows, n, block_size]: their tokens, `chains` [rows, n + 1, 4]: their hashes, to which those not known yet are added.
    """
    size = known.shape[2]
    for i in range(first, end):
        filled = min(computed[i] + num[i], tokens[i])
        while edge[i] <= filled:
            block, hashes = edge[i] // size, chains[row[i]]
            if edge[i] > chained[i]:
                hash_block(hashes[block - 1], known[row[i], block - 1], hashes[block], words)
                chained[i] = edge[i]
            name_block(blocks, index, counts, log, block_tables[row[i], block - 1], hashes, block)
            edge[i] += size


@compiled_loop(SOURCES)
def extend(chain: Int32, num_known: int, tokens: Int32, block_size: int, words: UInt64) -> None:
    """Fills `chain` [n + 1, 4] up, a root hash and those of n blocks of `tokens`, of which the first `num_known` are there."""
    for i in range(num_known, len(chain)):
        hash_block(chain[i - 1], tokens[(i - 1) * block_size : i * block_size], chain[i], words)


@compiled_loop(SOURCES)
def launch(
    row: Int32,
    tokens: Int32,
    goal: Int32,
    computed: Int32,
    cap: Int32,
    num: Int32,
    drafted: int,
    entries: Int32,
    sample: Bool,
) -> int:
    """Counts `num` tokens of each sequence as computed, `sample` and `entries` [5, n] having room for n of them.

    Writes for each that has tokens whether it samples, and its position, row, tokens, those computed before, and how many of the tokens
    are not known yet. Returns their number B. `drafted`: 1 if all tokens up to the goal are there.
    """
    count = 0
    for i in range(len(sample)):
        if not num[i]:
            continue
        target = computed[i] + num[i]
        entries[0, count], entries[1, count], entries[2, count], entries[3, count] = i, row[i], num[i], computed[i]
        entries[4, count] = max(target - tokens[i], 0)
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
    row: Int32,
    tokens: Int32,
    limit: Int32,
    base: Int32,
    attempt: Int32,
    fresh: Int32,
    ignore_eos: Int32,
    offer: Int32,
    slot: Int64,
    token_ids: Int32,
    positions: Int32,
    num_sampled: Int32,
    sampled: Int32,
    eos_token_ids: Int32,
    stops: Int32,
    entries: Int32,
    news: Int32,
    slots: Int64,
    flat: Int32,
) -> tuple[int, int, int, int]:
    """Makes sampled tokens known, up to the end of each answer.

    `positions` [B], -1: left meanwhile; `sampled` [B, K]: its tokens, valid in the first `num_sampled[i]` columns; `stops`: [B] number of
    them up to the first of its own stop tokens, beyond K: none. Writes for each of the R <= B sequences that got tokens `entries` [5, B]:
    index in the batch, position, attempt, offset, tokens kept; its slot; and all kept tokens to `flat` [B K]. Then to `news` [3, B] which
    of the R got their first token, the positions of those that are complete, and whether a stop token ended them. Returns R, how many
    tokens were kept, are first ones, and how many sequences are complete.
    """
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
            news[0, num_fresh] = count
            num_fresh += 1
        if stopped or offer[at] or tokens[at] >= limit[at]:
            news[1, num_complete], news[2, num_complete] = at, stopped
            num_complete += 1
        entries[0, count], entries[1, count], entries[2, count] = i, at, attempt[at]
        entries[3, count], entries[4, count] = base[at] + before, kept
        slots[count] = slot[at]
        num_flat += kept
        count += 1
    return count, num_flat, num_fresh, num_complete


@compiled_loop(SOURCES)
def enter(
    state: Int32,
    position: int,
    numbers: tuple[int, ...],
    token_ids: Int32,
    block_tables: Int32,
    chains: Int32,
    tokens: Int32,
    blocks: Int32,
    chain: Int32,
) -> None:
    """Writes `numbers` to a position, and known tokens, blocks and hashes to the row, which is the first of the numbers."""
    row = numbers[0]
    for line in range(len(state)):
        state[line, position] = numbers[line]
    for i in range(len(tokens)):
        token_ids[row, i] = tokens[i]
    for i in range(len(blocks)):
        block_tables[row, i] = blocks[i]
    for i in range(len(chain)):
        for word in range(HASH_WORDS):
            chains[row, i, word] = chain[i, word]


@compiled_loop(SOURCES)
def close_gaps(state: Int32, slot: Int64, gone: Int32, count: int) -> None:
    """The first `count` positions (of `state` [n, seats] and `slot`) move up over those in `gone`, which ascend."""
    for i in range(len(gone)):
        last = gone[i + 1] if i + 1 < len(gone) else count
        for at in range(gone[i] + 1, last):
            slot[at - i - 1] = slot[at]
    for line in range(len(state)):
        for i in range(len(gone)):
            last = gone[i + 1] if i + 1 < len(gone) else count
            for at in range(gone[i] + 1, last):
                state[line, at - i - 1] = state[line, at]


@compiled_loop(SOURCES)
def follow(positions: Int32, gone: Int32) -> None:
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
    slots, sample, words = np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(NUM_WORDS, np.uint64)
    arrays = plane, plane, np.zeros(NUM_COUNTS, np.int64), space
    put_compiled(globals())
    with one_compiles(SOURCES):
        place(*arrays, line, line, line, line, plane, 1, line, 0, 0, 0)
        ration(line, line, line, line, 0, 0, 0, 0)
        name_filled(*arrays, line, line, line, line, line, plane, space, space, line, 0, 0, words)
        extend(plane, 0, line, 1, words)
        launch(line, line, line, line, line, line, 0, plane, sample)
        append(line, line, line, line, line, line, line, line, slots, plane, line, line, plane, line, line, plane, plane, slots, line)
        enter(plane, 0, (0,) * NUM_LINES, plane, plane, space, line, line, plane)
        close_gaps(plane, slots, line, 0)
        follow(line, line)
