"""The sequences that run: numbers in numpy, so that a step costs what changes and not what runs.

Two index spaces. A *row* is a sequence's place in the arrays shared with the runner; it stays the same while the sequence runs
and is reused only after every step scheduled before it was left has committed. A *position* is its place in running order
(admission order), dense in [0, len); leaving closes the gap.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.row_sampling import RowSampling
from engine.runner import Batch
from engine.sequence import Sequence
from protocol.errors import ProtocolError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

Int = npt.NDArray[np.integer[Any]]

NEVER = np.iinfo(np.int32).max


class Flight:
    """A batch between schedule and commit."""

    __slots__ = ("batch", "has_leavers", "positions")

    def __init__(self, batch: Batch, positions: Int32) -> None:
        self.batch = batch
        self.positions = positions
        """int32 [B]: where each scheduled sequence is now, ascending; -1 once it has left."""
        self.has_leavers = False


class SequenceTable:
    """Rows and positions of all running sequences.

    State per position, all int32: `tokens` known; `goal` up to which it may be scheduled (known tokens, plus drafts or tokens still
    being sampled, never past `cap`); `computed` (scheduled ones included); `capacity` of its blocks in tokens; `limit` at which it
    ends; `cap` beyond which nothing is ever computed; `edge` of the next block to hash; `chained` tokens in blocks whose hash was
    known when it entered; `base` + token index = index in the whole answer; `attempt`; `fresh` 1 until its first token was reported;
    `ignore_eos`; `own_stops` 1 if it has stop tokens of its own.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        num_rows = 2 * max_num_seqs
        """Twice the seats: with two steps in flight a left row stays blocked while its seat is taken again."""
        self.block_size = block_size
        self._eos_token_ids = eos_token_ids
        max_num_blocks = -(-max_model_len // block_size)
        self.blocks_of_tokens: Int32 = np.empty((num_rows, max_num_blocks, block_size), np.int32)
        """`token_ids`, cut into blocks."""
        self.token_ids = self.blocks_of_tokens.reshape(num_rows, max_num_blocks * block_size)
        self.block_tables: Int32 = np.zeros((num_rows, max_num_blocks), np.int32)
        self.sampling = RowSampling(num_rows)
        self._state = np.zeros((14, max_num_seqs), np.int32)
        self.row, self.tokens, self.goal, self.computed, self.capacity, self.limit, self.cap = self._state[:7]
        self.edge, self.chained, self.base, self.attempt, self.fresh, self.ignore_eos, self.own_stops = self._state[7:]
        self.all_positions: Int32 = np.arange(max_num_seqs, dtype=np.int32)
        """Never written to; batches keep slices of it."""
        self.slot: Int64 = np.zeros(max_num_seqs, np.int64)
        self.running: list[Sequence] = []
        self.request_ids: list[str] = []
        """Replaced, never changed: batches keep it."""
        self.flights: deque[Flight] = deque()
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._left_rows: deque[tuple[int, int]] = deque()
        """(last step scheduled when it was left, row)."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def has_row(self) -> bool:
        return bool(self._free_rows)

    def enter(self, sequence: Sequence, *, computed: int, blocks: list[int], cap: int, edge: int) -> int:
        """Seats a sequence that owns `blocks` (in order) and has `computed` tokens in them. Returns its position."""
        request, tokens = sequence.request, sequence.tokens
        position, row, num_tokens = len(self.running), self._free_rows.pop(), len(tokens)
        self.token_ids[row, :num_tokens] = tokens
        self.block_tables[row, : len(blocks)] = blocks
        self.sampling.put(row, request.sampling, base=request.offset - sequence.num_first, eos_token_ids=self._eos_token_ids)
        self._state[:, position] = (
            row,
            num_tokens,
            min(num_tokens, cap),
            computed,
            len(blocks) * self.block_size,
            sequence.limit,
            cap,
            edge,
            (len(sequence.chain) - 1) * self.block_size,
            request.offset - sequence.num_first,
            request.key.attempt,
            num_tokens == sequence.num_first or sequence.first_token_id is not None,
            request.sampling.ignore_eos,
            bool(sequence.stop_token_ids),
        )
        self.slot[position] = request.slot
        self.running.append(sequence)
        self.request_ids = [*self.request_ids, request.key.request_id]
        sequence.row, sequence.stage = row, "running"
        return position

    def append_blocks(self, positions: Int, counts: Int, blocks: list[int]) -> None:
        """Gives `counts[i]` >= 1 of `blocks` to each of `positions`, in order. The counts add up to len(blocks)."""
        rows, have = self.row[positions], self.capacity[positions] // self.block_size
        added: Int | int = self.block_size
        if len(blocks) > len(positions):
            added = counts * self.block_size
            within = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
            rows, have = np.repeat(rows, counts), np.repeat(have, counts) + within
        self.block_tables[rows, have] = blocks
        self.capacity[positions] += added

    def blocks_of(self, position: int) -> list[int]:
        """Its blocks in sequence order."""
        blocks: list[int] = self.block_tables[self.row[position], : self.capacity[position] // self.block_size].tolist()
        return blocks

    def known(self, position: int) -> Int32:
        """Its known tokens: int32 view."""
        return self.token_ids[self.row[position], : self.tokens[position]]

    def leave(self, positions: Iterable[int]) -> None:
        """Unseats sequences (at least one). Their rows are free when the steps in flight have committed."""
        gone = sorted(positions, reverse=True)
        last_step = self.flights[-1].batch.step if self.flights else None
        num_before = count = len(self.running)
        ids = self.request_ids.copy()
        for position in gone:
            row = int(self.row[position])
            self.sampling.left(row)
            if last_step is None:
                self._free_rows.append(row)
            else:
                self._left_rows.append((last_step, row))
            del self.running[position], ids[position]
            count -= 1
            if position < count:
                self._state[:, position:count] = self._state[:, position + 1 : count + 1]
                self.slot[position:count] = self.slot[position + 1 : count + 1]
        self.request_ids = ids
        for flight in self.flights:
            moved = np.full(num_before, -1, np.int32)
            kept = np.delete(self.all_positions[:num_before], gone)
            moved[kept] = self.all_positions[:count]
            flight.positions = np.where(flight.positions >= 0, moved[flight.positions], -1)
            flight.has_leavers = True

    def committed(self, step: int) -> None:
        """Rows left before or in `step` may be used again."""
        while self._left_rows and self._left_rows[0][0] <= step:
            self._free_rows.append(self._left_rows.popleft()[1])

    def check_empty(self) -> None:
        """Raises ProtocolError unless every row is free."""
        if self.running or self._left_rows or len(self._free_rows) != len(self.token_ids):
            raise ProtocolError(f"{len(self.running)} sequences run and {len(self._left_rows)} rows are kept back in an idle engine")
