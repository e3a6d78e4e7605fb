"""The loops over the table of running sequences, compiled like those over blocks: a step costs what its sequences cost,
and not what numpy calls cost. The loops of one step are in loops_step.py.

`Blocks`, `Index`, `Counts` and `Log` are as in loops_blocks.py. Each kind of array has a type of its own here too:

- `State` int32 [NUM_LINES, seats]: the lines below, with an entry per position, as `SequenceTable` describes them.
- `RequestNumbers` int64 [seats]: one entry per position.
- `TokenIds` int32 [rows, n], `TokenBlocks` (the same, cut into blocks) [rows, n, block_size], `BlockTables` [rows, n],
  `Chains` [rows, n + 1, 4]: one line per row.
- `Positions` int32 [B]: the positions of a batch's sequences, ascending; -1 where the sequence has left.
"""

from functools import cache
from typing import NewType

import numpy as np

from engine.scheduler import loops_blocks, loops_hash
from engine.scheduler.loops_blocks import NUM_COUNTS, BlockIds, Blocks, Counts, Index, Log, name_block
from engine.scheduler.loops_hash import NUM_WORDS, Chain, hash_block
from jit.loops_compile import compiled_loop, one_compiles, put_compiled
from protocol.arrays import Int32, Int64, UInt64
from protocol.block_hash import HASH_WORDS

SOURCES = (__file__, *loops_blocks.SOURCES, *loops_hash.SOURCES)

State = NewType("State", Int32)
RequestNumbers = NewType("RequestNumbers", Int64)
TokenIds = NewType("TokenIds", Int32)
TokenBlocks = NewType("TokenBlocks", Int32)
BlockTables = NewType("BlockTables", Int32)
Chains = NewType("Chains", Int32)
Positions = NewType("Positions", Int32)

ROW, TOKENS, GOAL, COMPUTED, CAPACITY, LIMIT, CAP = range(7)
EDGE, CHAINED, BASE, ATTEMPT, FRESH, IGNORE_EOS, PRODUCER, GUIDED = range(7, 15)
NUM_OWN_LINES = 15
"""The lines that a sequence brings along and takes with it. Each step writes the others anew."""
NUM, ALLOWED = 15, 16
NUM_LINES = 17


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
    """Makes the blocks findable that the sequences at positions `first` to `end` - 1 fill with `known` tokens when NUM
    more of these are computed. Hashes that were not known yet are added to `chains`.
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
    """Writes a sequence to a position and a row: `numbers`, one for each of its own lines, go to the position; its
    known tokens, blocks and hashes go to the row.
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
    """Closes the gaps that the positions in `gone` (ascending) leave among the first `count`: later sequences move up,
    in their own lines of `state` and in `request_numbers`.
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
    """Brings `positions` (ascending; -1: the sequence left before) up to date after those in `gone`
    (ascending) have left.
    """
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
    one_seat = State(np.zeros((NUM_LINES, 1), np.int32))
    request_numbers = RequestNumbers(np.zeros(0, np.int64))
    blocks, index, counts, log = Blocks(plane), Index(plane), Counts(np.zeros(NUM_COUNTS, np.int64)), Log(space)
    token_ids, tables, chains = TokenIds(plane), BlockTables(plane), Chains(space)
    numbers = (0,) * NUM_OWN_LINES
    put_compiled(globals())
    with one_compiles(SOURCES):
        cache_full_blocks(blocks, index, counts, log, state, tables, TokenBlocks(space), chains, 0, 0, words)
        extend(Chain(plane), 0, line, 1, words)
        enter(one_seat, 0, numbers, token_ids, tables, chains, line, BlockIds(line), Chain(plane))
        close_gaps(state, request_numbers, line, 0)
        follow(Positions(line), line)
