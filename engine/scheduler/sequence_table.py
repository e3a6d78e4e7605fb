"""The sequences that run. Their numbers are in numpy arrays, so that a step costs what changes and not what runs.

There are two index spaces. A *row* is a sequence's place in the arrays shared with the runner. It stays the same while
the sequence runs, and is reused only when every step scheduled before the sequence left has committed. A *position* is
its place in running order (admission order), dense in [0, len); when a sequence leaves, the gap closes.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from engine.runner import Batch
from engine.sampling_metadata import SamplingMetadata
from engine.scheduler import loops_sequences as loops
from engine.scheduler.loops_blocks import BlockIds
from engine.scheduler.loops_hash import NUM_WORDS, Chain
from engine.scheduler.loops_sequences import (
    BlockTables,
    Chains,
    Positions,
    RequestNumbers,
    State,
    TokenBlocks,
    TokenIds,
)
from engine.scheduler.sequence import Sequence
from protocol.arrays import Bool, Int32
from protocol.block_hash import HASH_WORDS
from protocol.errors import ProtocolError

NEVER = np.iinfo(np.int32).max


class InFlightStep:
    """A batch between schedule and commit."""

    __slots__ = ("batch", "positions")

    def __init__(self, batch: Batch, positions: Positions) -> None:
        self.batch = batch
        self.positions = positions
        """Where each scheduled sequence is now: int32 [B], ascending, -1 once it has left."""


class SequenceTable:
    """Rows and positions of all running sequences.

    Each position has these numbers, lines of `state` as loops_sequences.py names them:

    - row; `tokens` that are known; `goal` up to which it may be scheduled: known tokens, plus drafts or tokens that are
      still being sampled, never past `cap`; `computed` tokens, scheduled ones included; `capacity` of its blocks in
      tokens; `limit` of known tokens at which it ends; `cap` beyond which nothing is ever computed.
    - `edge`: the end, in tokens, of the next block to make findable; `chained`: tokens in blocks whose hash is known;
      base: base + token index = index in the whole answer; attempt; fresh: 1 until its first token was reported;
      ignore_eos; producer: 1 if its first token ends it here; guided: 1 under a grammar.
    - `num`: tokens that the step being scheduled gives it; `allowed`: what the step's budget leaves of its goal, in
      steps that need to know.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        loops.compile_all()
        num_rows = 2 * max_num_seqs
        """There are two rows per seat: while steps are in flight, the row of a sequence that left stays blocked and its
        seat is taken again."""
        self.block_size = block_size
        self._eos_token_ids = eos_token_ids
        max_num_blocks = -(-max_model_len // block_size)
        self.blocks_of_tokens = TokenBlocks(np.empty((num_rows, max_num_blocks, block_size), np.int32))
        """`token_ids`, cut into blocks."""
        self.token_ids = TokenIds(self.blocks_of_tokens.reshape(num_rows, max_num_blocks * block_size))
        self.block_tables = BlockTables(np.zeros((num_rows, max_num_blocks), np.int32))
        self.chains = Chains(np.empty((num_rows, max_num_blocks + 1, HASH_WORDS), np.int32))
        """Root hash, then the hashes of the full blocks of its known tokens below `chained`."""
        self.words = np.zeros(NUM_WORDS, np.uint64)
        """Working space for hashing blocks."""
        self.sampling = SamplingMetadata(num_rows)
        self.state = state = State(np.zeros((loops.NUM_LINES, max_num_seqs), np.int32))
        self.row: Int32 = state[loops.ROW]
        self.tokens: Int32 = state[loops.TOKENS]
        self.goal: Int32 = state[loops.GOAL]
        self.computed: Int32 = state[loops.COMPUTED]
        self.capacity: Int32 = state[loops.CAPACITY]
        self.limit: Int32 = state[loops.LIMIT]
        self.cap: Int32 = state[loops.CAP]
        self.edge: Int32 = state[loops.EDGE]
        self.chained: Int32 = state[loops.CHAINED]
        self.num: Int32 = state[loops.NUM]
        self.allowed: Int32 = state[loops.ALLOWED]
        self.no_stops = np.full(max_num_seqs, NEVER, np.int32)
        """The stops of a batch in which no sequence has stop tokens of its own. Never written to."""
        self.request_numbers = RequestNumbers(np.zeros(max_num_seqs, np.int64))
        self.running: list[Sequence] = []
        self.num_own_stops = 0
        """How many running sequences have stop tokens of their own."""
        self.request_ids: list[str] = []
        """Request ids in running order. The list is replaced and never changed, because batches keep it."""
        self.in_flight: deque[InFlightStep] = deque()
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._left_rows: deque[tuple[int, int]] = deque()
        """(the last step scheduled when the row was left, row)."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def has_row(self) -> bool:
        return bool(self._free_rows)

    def enter(self, sequence: Sequence, *, computed: int, blocks: BlockIds, cap: int, edge: int) -> int:
        """Seats a sequence that owns `blocks` (in order) and has `computed` tokens in them. Returns its position."""
        request, tokens = sequence.request, sequence.tokens
        position, row, num_tokens = len(self.running), self._free_rows.pop(), len(tokens)
        base = request.offset - sequence.num_first
        numbers = [0] * loops.NUM_OWN_LINES
        numbers[loops.ROW] = row
        numbers[loops.TOKENS] = num_tokens
        numbers[loops.GOAL] = min(num_tokens, cap)
        numbers[loops.COMPUTED] = computed
        numbers[loops.CAPACITY] = len(blocks) * self.block_size
        numbers[loops.LIMIT] = sequence.limit
        numbers[loops.CAP] = cap
        numbers[loops.EDGE] = edge
        numbers[loops.CHAINED] = (len(sequence.chain) - 1) * self.block_size
        numbers[loops.BASE] = base
        numbers[loops.ATTEMPT] = request.key.attempt
        numbers[loops.FRESH] = int(num_tokens == sequence.num_first or sequence.first_token_id is not None)
        numbers[loops.IGNORE_EOS] = int(request.sampling.ignore_eos)
        numbers[loops.PRODUCER] = int(sequence.kv == "producer")
        numbers[loops.GUIDED] = int(request.sampling.grammar is not None)
        loops.enter(
            self.state,
            position,
            tuple(numbers),
            self.token_ids,
            self.block_tables,
            self.chains,
            tokens,
            blocks,
            sequence.chain,
        )
        self.sampling.put(row, request.sampling, base=base, eos_token_ids=self._eos_token_ids, key=request.key)
        self.request_numbers[position] = request.request_number
        self.running.append(sequence)
        self.num_own_stops += bool(sequence.stop_token_ids)
        self.request_ids = [*self.request_ids, request.key.request_id]
        sequence.row, sequence.stage = row, "running"
        return position

    def extend_chain(self, sequence: Sequence, num_blocks: int) -> None:
        """Brings the chain of a sequence that does not run up to so many blocks of its known tokens."""
        num_known = len(sequence.chain)
        if num_known <= num_blocks:
            chain = Chain(np.empty((num_blocks + 1, HASH_WORDS), np.int32))
            chain[:num_known] = sequence.chain
            loops.extend(chain, num_known, sequence.tokens, self.block_size, self.words)
            sequence.chain = chain

    def answering(self) -> Bool:
        """Which sequences lack one token, drafts aside: those that write an answer or lack the last token of a
        prompt. bool [len].
        """
        count = len(self)
        goal, computed = self.goal[:count], self.computed[:count]
        answering: Bool = (goal > computed) & (computed + 1 >= self.tokens[:count])
        return answering

    def passed_over(self) -> list[str]:
        """Request ids of the answers that got no token in the newest step in flight. For checks, right after it
        was scheduled.
        """
        if not self.in_flight or len(self.in_flight[-1].positions) == len(self):
            return []
        answering = self.answering()
        answering[self.in_flight[-1].positions] = False
        return [self.request_ids[position] for position in answering.nonzero()[0].tolist()]

    def append_blocks(self, position: int, blocks: Int32) -> None:
        row, have = self.row[position], self.capacity[position] // self.block_size
        self.block_tables[row, have : have + len(blocks)] = blocks
        self.capacity[position] += len(blocks) * self.block_size

    def blocks_of(self, position: int) -> Int32:
        """A sequence's blocks in order: an int32 view, valid until another sequence enters."""
        return self.block_tables[self.row[position], : self.capacity[position] // self.block_size]

    def chain_of(self, position: int) -> Int32:
        """A sequence's root hash and the known hashes of its full blocks: a view, int32 [n, 4]."""
        return self.chains[self.row[position], : self.chained[position] // self.block_size + 1]

    def known(self, position: int) -> Int32:
        """A sequence's known tokens: an int32 view."""
        return self.token_ids[self.row[position], : self.tokens[position]]

    def leave(self, positions: Iterable[int]) -> None:
        """Unseats at least one sequence. Its row is free when the steps in flight have committed."""
        gone = sorted(positions)
        last_step = self.in_flight[-1].batch.step if self.in_flight else None
        ids = self.request_ids.copy()
        for position in reversed(gone):
            sequence = self.running.pop(position)
            del ids[position]
            self.num_own_stops -= bool(sequence.stop_token_ids)
            self.sampling.left(sequence.row)
            if last_step is None:
                self._free_rows.append(sequence.row)
            else:
                self._left_rows.append((last_step, sequence.row))
        self.request_ids = ids
        left = np.array(gone, np.int32)
        loops.close_gaps(self.state, self.request_numbers, left, len(ids) + len(gone))
        for in_flight_step in self.in_flight:
            loops.follow(in_flight_step.positions, left)

    def committed(self, step: int) -> None:
        """The steps up to `step` have committed: rows that were left with no later step in flight may be used again."""
        while self._left_rows and self._left_rows[0][0] <= step:
            self._free_rows.append(self._left_rows.popleft()[1])

    def check_empty(self) -> None:
        """Raises ProtocolError unless every row is free."""
        if self.running or self._left_rows or len(self._free_rows) != len(self.token_ids):
            raise ProtocolError(
                f"{len(self.running)} sequences run and {len(self._left_rows)} rows are held in an idle engine"
            )
