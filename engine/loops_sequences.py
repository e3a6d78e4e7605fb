"""The loops over running sequences, compiled like those over blocks: a step costs what its sequences are, and not what numpy calls cost.

Arrays [seats] hold one entry per position, as `SequenceTable` describes them; `block_tables`, `token_ids`, `known` and `chains` have a
line per row. blocks, index, counts, log: as in loops_blocks.py. Arrays [B] have an entry per sequence of a batch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.loops_blocks import NUM_BLANK, NUM_CACHED, NUM_COUNTS, name_block, pop
from engine.loops_compile import compiled_loop, one_compiles
from protocol.block_hash import HASH_WORDS

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Int = Any
"""A Python int, or a number out of an array."""

STOPPED = 1
COMPLETE = 2
FRESH = 4
"""Marks of `append`: ended by a stop token, ended at all, got the first token that it got here."""


@compiled_loop
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
    block_size: Int,
    num: Int32,
    threshold: Int,
    budget: Int,
) -> Int:
    """Writes to `num` the tokens of the first len(num) sequences, each up to its goal and up to `threshold`, together up to `budget`,
    and gives them the blocks for these. Returns 1; 0 if blocks lack: then nobody got one."""
    wanted = 0
    for i in range(len(num)):
        num[i] = min(goal[i] - computed[i], threshold, budget)
        budget -= num[i]
        lacking = computed[i] + num[i] - capacity[i]
        if lacking > 0:
            wanted += (lacking + block_size - 1) // block_size
    if wanted > counts[NUM_BLANK] + counts[NUM_CACHED]:
        return 0
    for i in range(len(num)):
        while capacity[i] < computed[i] + num[i]:
            block_tables[row[i], capacity[i] // block_size] = pop(blocks, index, counts, log)
            capacity[i] += block_size
    return 1


@compiled_loop
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
    first: Int,
    num: Int32,
    unhashed: Int32,
    positions: Int32,
    new_hashes: Int32,
) -> Int:
    """Makes the blocks findable that `num` more tokens, for the len(num) sequences from position `first` on, fill with known tokens.

    `known` [rows, n, block_size]: their tokens, `chains` [rows, n + 1, 4]: their hashes. Where a hash is not known yet, what it is made
    of goes to `unhashed` [seats, 4 + block_size]: parent and tokens, of one block of each sequence, and its position to `positions`.
    Returns how many; call it again with their hashes as `new_hashes` (at first empty) until there are none.
    """
    size = known.shape[2]
    for i in range(len(new_hashes)):
        at = positions[i]
        for word in range(HASH_WORDS):
            chains[row[at], edge[at] // size, word] = new_hashes[i, word]
        chained[at] = edge[at]
    num_unhashed = 0
    for i in range(len(num)):
        at = first + i
        filled = min(computed[at] + num[i], tokens[at])
        while edge[at] <= filled:
            end = edge[at] // size
            if edge[at] > chained[at]:
                for word in range(HASH_WORDS):
                    unhashed[num_unhashed, word] = chains[row[at], end - 1, word]
                for token in range(size):
                    unhashed[num_unhashed, HASH_WORDS + token] = known[row[at], end - 1, token]
                positions[num_unhashed] = at
                num_unhashed += 1
                break
            name_block(blocks, index, counts, log, block_tables[row[at], end - 1], chains[row[at]], end)
            edge[at] += size
    return num_unhashed


@compiled_loop
def launch(
    row: Int32,
    tokens: Int32,
    goal: Int32,
    computed: Int32,
    cap: Int32,
    num: Int32,
    drafted: Int,
    positions: Int32,
    rows: Int32,
    num_scheduled: Int32,
    num_computed: Int32,
    ahead: Int32,
    sample: Bool,
) -> Int:
    """Counts `num` tokens of the first len(num) sequences as computed. Writes the arrays of the batch, and how many of the tokens are not
    known yet (`ahead`); returns B, for those without tokens are not in it. `drafted`: 1 if all tokens up to the goal are there."""
    count = 0
    for i in range(len(num)):
        if not num[i]:
            continue
        target = computed[i] + num[i]
        positions[count], rows[count], num_scheduled[count], num_computed[count] = i, row[i], num[i], computed[i]
        ahead[count] = max(target - tokens[i], 0)
        computed[i] = target
        if drafted:
            sample[count] = target >= tokens[i]
        else:
            sample[count] = target == goal[i]
            if target == goal[i]:
                goal[i] = min(goal[i] + 1, cap[i])
        count += 1
    return count


@compiled_loop
def append(
    row: Int32,
    tokens: Int32,
    limit: Int32,
    base: Int32,
    attempt: Int32,
    fresh: Int32,
    ignore_eos: Int32,
    slot: Int64,
    token_ids: Int32,
    positions: Int32,
    num_sampled: Int32,
    sampled: Int32,
    eos_token_ids: Int32,
    stops: Int32,
    entries: Int32,
    slots: Int64,
    flat: Int32,
) -> tuple[Int, Int]:
    """Makes sampled tokens known, up to the end of each answer.

    `positions` [B], -1: left meanwhile; `sampled` [B, K]: its tokens, valid in the first `num_sampled[i]` columns; `stops`: [B] number of
    them up to the first of its own stop tokens, beyond K: none. Writes for each of the R <= B sequences that got tokens `entries` [6, B]:
    index in the batch, position, attempt, offset, tokens kept, marks; its slot; and all kept tokens to `flat` [B K]. Returns R and how
    many tokens were kept.
    """
    count, num_flat = 0, 0
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
        marks = FRESH if fresh[at] else 0
        if stopped or tokens[at] >= limit[at]:
            marks |= COMPLETE | STOPPED if stopped else COMPLETE
        entries[0, count], entries[1, count], entries[2, count] = i, at, attempt[at]
        entries[3, count], entries[4, count], entries[5, count] = base[at] + before, kept, marks
        slots[count] = slot[at]
        num_flat += kept
        count += 1
    return count, num_flat


@compiled_loop
def close_gaps(state: Int32, slot: Int64, gone: Int32, count: Int) -> None:
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


@compiled_loop
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


def compile_all() -> None:
    """Calls every loop once, with nothing to do."""
    line, plane, space = (np.zeros((0,) * num_axes, np.int32) for num_axes in (1, 2, 3))
    slots, sample = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    arrays = plane, plane, np.zeros(NUM_COUNTS, np.int64), space
    with one_compiles(__file__):
        place(*arrays, line, line, line, line, plane, 1, line, 0, 0)
        name_filled(*arrays, line, line, line, line, line, plane, space, space, 0, line, plane, line, plane)
        launch(line, line, line, line, line, line, 0, line, line, line, line, line, sample)
        append(line, line, line, line, line, line, line, slots, plane, line, line, plane, line, line, plane, slots, line)
        close_gaps(plane, slots, line, 0)
        follow(line, line)
