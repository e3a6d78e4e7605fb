"""One engine's pass: which tokens of which sequence run next, and what becomes of the result. Knows no phases.

A sequence has `tokens` known and `computed` done; each step closes some of that gap. One step:

 1. `schedule`: running sequences in admission order, then arrived ones (their KV came from elsewhere), then the waiting line, under
    one budget of tokens. A running one that finds no block evicts another; a step that evicted admits nobody from the line.
 2. The runner executes the batch. Meanwhile `schedule` may be called once more: tokens still being sampled are placeholders.
 3. `commit`: sampled tokens become known; sequences that are complete leave and free their blocks.

Whatever leaves while steps are in flight keeps its row and blocks out of use until those steps have committed.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.outcome import Committed, Events, Finished, PromptDone, Reserved
from engine.runner import Batch, RowSampling, StepOutput
from engine.sequence import Request, Sequence
from engine.sequence_table import NEVER, Flight, SequenceTable
from engine.waiting_line import WaitingLine
from protocol.block_hash import root_hash
from protocol.errors import InvalidRequest, ProtocolError
from protocol.messages import FinishReason, RequestKey

__all__ = ["Committed", "Events", "Finished", "PromptDone", "Proposer", "Reserved", "Scheduler"]

Int32 = npt.NDArray[np.int32]


class Proposer(Protocol):
    """Guesses the next tokens of a sequence."""

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        """`token_ids`: all known tokens, not to be kept. Returns the drafts, at most `max_num_drafts`."""
        ...


class Scheduler:
    """Plain synchronous state machine; not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        fingerprint: bytes = b"",
        eos_token_ids: tuple[int, ...] = (),
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config
        self.blocks = BlockManager(num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        self._fingerprint = fingerprint
        self._eos_token_ids = eos_token_ids
        self._proposer = proposer if config.num_speculative_tokens else None
        self._table = SequenceTable(max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, block_size=config.block_size)
        self._sampling = RowSampling(temperatures=self._table.temperatures, seeds=self._table.seeds, answer_bases=self._table.answer_bases)
        self._live: dict[RequestKey, Sequence] = {}
        self._line = WaitingLine(config.scheduling_policy, config.priority_aging_s)
        self._arrived: deque[Sequence] = deque()
        self._num_reserved = 0
        self._num_offers = 0
        self._num_unoffered = 0
        self._step = 0
        self._events = Events()
        self._spare_blocks = int(config.watermark * num_blocks)

    # ---- counts

    @property
    def num_waiting(self) -> int:
        """In the line, or remote and not offered yet."""
        return len(self._line) + self._num_unoffered

    @property
    def num_running(self) -> int:
        return len(self._table)

    @property
    def num_reserved(self) -> int:
        """Own a destination that is not complete yet."""
        return self._num_reserved

    @property
    def num_arrived(self) -> int:
        """All KV there, no seat yet."""
        return len(self._arrived)

    @property
    def num_in_flight(self) -> int:
        """Batches scheduled and not committed."""
        return len(self._table.flights)

    @property
    def num_free_blocks(self) -> int:
        return self.blocks.num_free

    @property
    def idle(self) -> bool:
        """Nothing is live and nothing in flight."""
        return not self._live and not self._table.flights

    @property
    def running_ids(self) -> list[str]:
        """In running order."""
        return self._table.request_ids

    @property
    def waiting_ids(self) -> list[str]:
        """The line, head first."""
        return [sequence.request.key.request_id for sequence in self._line.in_order()]

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Takes a request in. Raises InvalidRequest if it can never be served here."""
        self._check_servable(request)
        if request.key in self._live:
            raise ProtocolError(f"{request.key} is live already")
        num_prompt = len(request.prompt_token_ids)
        sequence = Sequence(
            request=request,
            kv=request.kv,
            stage="unoffered",
            limit=min(num_prompt + request.max_tokens, self.config.max_model_len),
            root_hash=root_hash(self._fingerprint, request.cache_salt),
            tokens=np.asarray(request.prompt_token_ids, np.int32),
            num_first=num_prompt,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
        )
        sequence.rank = self._line.rank_of(sequence)
        if self.config.enable_prefix_caching:
            sequence.extend_hashes(sequence.tokens, num_prompt // self.config.block_size, self.config.block_size)
        self._live[request.key] = sequence
        if request.kv == "remote":
            self._num_unoffered += 1
        else:
            self._line.push(sequence)

    def _check_servable(self, request: Request) -> None:
        config, num_prompt = self.config, len(request.prompt_token_ids)
        if num_prompt < 1:
            raise InvalidRequest("prompt_token_ids", num_prompt, "at least 1 token")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens", request.max_tokens, "at least 1")
        if num_prompt > config.max_model_len - 1:
            raise InvalidRequest("prompt_token_ids", num_prompt, f"at most max_model_len - 1 = {config.max_model_len - 1} tokens")
        known = self._num_remote_tokens(request) if request.kv == "remote" else num_prompt
        if self._num_blocks(known) > self.blocks.num_usable:
            room = self.blocks.num_usable * config.block_size
            raise InvalidRequest("prompt_token_ids", num_prompt, f"the KV pool holds {room} tokens")
        if not config.enable_chunked_prefill and request.kv != "remote" and num_prompt > config.max_num_batched_tokens:
            limit = f"at most max_num_batched_tokens = {config.max_num_batched_tokens} tokens while enable_chunked_prefill is off"
            raise InvalidRequest("prompt_token_ids", num_prompt, limit)

    def offer(self, key: RequestKey) -> None:
        """The first handoff of a remote request is here: it may reserve from now on. Unknown key or a later offer: no-op."""
        sequence = self._live.get(key)
        if sequence is not None and sequence.stage == "unoffered":
            self._num_unoffered -= 1
            self._line.push(sequence)

    def publish(self, key: RequestKey, num_tokens: int) -> None:
        """Received tokens below `num_tokens` are verified: whole blocks below it may be hit from now on."""
        sequence = self._live.get(key)
        if sequence is None or sequence.stage != "reserved" or not self.config.enable_prefix_caching:
            return
        end = min(num_tokens, sequence.num_first) // self.config.block_size
        for index in range(sequence.num_published, end):
            self.blocks.insert(sequence.hashes[index], sequence.blocks[index])
        sequence.num_published = max(sequence.num_published, end)

    def arrive(self, key: RequestKey, first_token_id: int) -> None:
        """All KV of a reserved request is there and verified: it decodes as soon as it finds a seat. Unknown key: no-op."""
        sequence = self._live.get(key)
        if sequence is None:
            return
        if sequence.stage != "reserved":
            raise ProtocolError(f"{key} arrived while {sequence.stage}")
        self.publish(key, sequence.num_first)
        sequence.tokens = np.append(sequence.tokens, np.int32(first_token_id))
        sequence.first_token_id = first_token_id
        sequence.stage = "arrived"
        self._num_reserved -= 1
        self._arrived.append(sequence)

    def abort(self, key: RequestKey) -> None:
        """Forgets a request and frees its blocks, those a step in flight uses when that has committed. Unknown key: no-op."""
        self.blocks.release(self._forget(key))

    def detach(self, key: RequestKey) -> list[int]:
        """Forgets a request without freeing: the caller owns the returned blocks (in order) and gives them to `blocks.free` later."""
        blocks = self._forget(key)
        self.blocks.hand_over(len(blocks))
        return [int(block) for block in blocks]

    def block_ids(self, key: RequestKey) -> list[int]:
        """Blocks of a running request, in order. Raises KeyError if it is not live."""
        return [int(block) for block in self._table.blocks_of(self._table.running.index(self._live[key]))]

    def fail_step(self) -> list[RequestKey]:
        """The oldest step in flight could not be executed: what it and later ones would have computed is no longer findable.

        Returns the requests that are spoilt: those in flight, and those that reserved blocks found while they were being computed.
        The caller aborts or detaches them all.
        """
        table = self._table
        if not table.flights:
            raise ProtocolError("a failed step without a batch in flight")
        spoilt: dict[RequestKey, None] = {}
        blocks: set[int] = set()
        for flight in table.flights:
            batch, size = flight.batch, self.config.block_size
            for row, start, num in zip(batch.rows.tolist(), batch.num_computed.tolist(), batch.num_scheduled.tolist(), strict=True):
                blocks.update(batch.block_tables[row, start // size : -(-(start + num) // size)].tolist())
            spoilt.update(dict.fromkeys(table.running[position].request.key for position in flight.positions.tolist() if position >= 0))
        for block in blocks:
            self.blocks.forget(block)
        spoilt.update({key: None for key, sequence in self._live.items() if not blocks.isdisjoint(sequence.blocks)})
        batch = table.flights.popleft().batch
        self.blocks.step_committed()
        table.committed(batch.step)
        return list(spoilt)

    def _forget(self, key: RequestKey) -> Int32:
        """Takes a request out wherever it stands. Returns the blocks it owned."""
        sequence = self._live.pop(key, None)
        if sequence is None:
            return np.empty(0, np.int32)
        if sequence.stage == "unoffered":
            self._num_unoffered -= 1
        elif sequence.stage == "waiting":
            self._line.discard(sequence)
        elif sequence.stage == "reserved":
            self._num_reserved -= 1
        elif sequence.stage == "arrived":
            self._arrived.remove(sequence)
        else:
            position = self._table.running.index(sequence)
            blocks = self._table.blocks_of(position).copy()
            self._leave([position])
            return blocks
        return np.array(sequence.blocks, np.int32)

    # ---- schedule

    def schedule(self) -> Batch | None:
        """Builds the next batch. None: nothing can be executed now, or (with a step in flight) commit first and call again."""
        table, config = self._table, self.config
        if len(table.flights) > 1 or (table.flights and self._proposer is not None):
            return None
        alone = len(table) + len(self._line) + len(self._arrived) == 1
        num_preempted = len(self._events.preempted)
        running = self._place_running(alone)
        if running is None:
            return None
        self._hash_running(running)
        budget = config.max_num_batched_tokens - int(running.sum())
        newcomers: list[int] = []
        while self._arrived and budget > 0 and self._has_seat():
            newcomers.append(self._enter(self._arrived.popleft()))
            budget -= 1
        if len(self._events.preempted) == num_preempted:
            self._serve_line(budget, alone, newcomers)
        return self._launch(np.append(running, np.array(newcomers, np.int32)))

    def take_events(self) -> Events:
        """What schedules decided since the last call."""
        events, self._events = self._events, Events()
        return events

    def _place_running(self, alone: bool) -> Int32 | None:
        """Tokens for each running sequence, int32 [number still running], with the blocks for them allocated. None: put off."""
        table, config = self._table, self.config
        count = len(table)
        num = table.goal[:count] - table.computed[:count]
        if config.long_prefill_token_threshold and not alone:
            np.minimum(num, config.long_prefill_token_threshold, out=num)
        if int(num.sum()) > config.max_num_batched_tokens:
            before = np.cumsum(num) - num
            num = np.clip(config.max_num_batched_tokens - before, 0, num)
        target = table.computed[:count] + num
        short = np.flatnonzero(target > table.capacity[:count])
        if not short.size:
            return num
        size = config.block_size
        wants = (target[short] - table.capacity[short] + size - 1) // size
        if int(wants.sum()) <= self.blocks.num_free:
            for position, want in zip(short.tolist(), wants.tolist(), strict=True):
                self._grow(position, want)
            return num
        if table.flights:
            return None
        if config.scheduling_policy == "priority":
            return self._place_by_priority(alone)
        return self._place_under_pressure(num, short.tolist(), wants.tolist())

    def _place_under_pressure(self, num: Int32, short: list[int], wants: list[int]) -> Int32:
        """fcfs, blocks lacking: the newest running sequence goes, possibly the one that asks. Victims are never placed yet."""
        end = count = len(self._table)
        for position, want in zip(short, wants, strict=True):
            while position < end and want > self.blocks.num_free:
                end -= 1
                if end == 0:
                    last = self._place_last(0, int(num[0]))
                    end = 0 if last is None else 1
                    num[0] = last or 0
                    break
                self._preempt(end)
            else:
                if position < end:
                    self._grow(position, want)
                    continue
            break
        if end < count:
            self._leave(range(end, count))
        return num[:end]

    def _place_by_priority(self, alone: bool) -> Int32:
        """priority, blocks lacking: the worst (priority, arrival) goes; what it was given in this step returns to the budget."""
        table, config = self._table, self.config
        count, budget = len(table), config.max_num_batched_tokens
        threshold = config.long_prefill_token_threshold if config.long_prefill_token_threshold and not alone else NEVER
        given = dict.fromkeys(range(count), 0)
        """Tokens by position, of those that stay, in running order."""
        for position in range(count):
            if position not in given:
                continue
            num = min(int(table.goal[position] - table.computed[position]), threshold, budget)
            while num > 0 and self._want(position, num) > self.blocks.num_free:
                if len(given) == 1:
                    last = self._place_last(position, num)
                    num = last or 0
                    if last is None:
                        del given[position]
                    break
                victim = max(given, key=lambda candidate: table.running[candidate].rank[:2])
                self._preempt(victim)
                budget += given.pop(victim)
                if victim == position:
                    num = 0
            if num > 0:
                self._grow(position, self._want(position, num))
                given[position] = num
                budget -= num
        if len(given) < count:
            self._leave([position for position in range(count) if position not in given])
        return np.array(list(given.values()), np.int32)

    def _place_last(self, position: int, num: int) -> int | None:
        """The only sequence left in the batch lacks blocks: it takes what fits, or waits while others own blocks.

        None: it has left, evicted for an arrived one that would have no seat, or ended because it owns the whole pool.
        """
        table, size = self._table, self.config.block_size
        capacity = int(table.capacity[position])
        fits = capacity + self.blocks.num_free * size - int(table.computed[position])
        if fits > 0:
            num = min(num, fits)
            self._grow(position, self._want(position, num))
            return num
        if self._arrived and self.config.max_num_seqs == 1:
            self._preempt(position)
            return None
        if self.blocks.num_owned > capacity // size:
            return 0
        key = table.running[position].request.key
        self.blocks.release(table.blocks_of(position))
        del self._live[key]
        self._events.ended.append((key, "length"))
        return None

    def _want(self, position: int, num: int) -> int:
        """Blocks lacking for `num` more tokens."""
        lacking = int(self._table.computed[position]) + num - int(self._table.capacity[position])
        return max(0, -(-lacking // self.config.block_size))

    def _grow(self, position: int, count: int) -> None:
        table = self._table
        have = int(table.capacity[position]) // self.config.block_size
        table.block_tables[table.row[position], have : have + count] = self.blocks.allocate(count)
        table.capacity[position] += count * self.config.block_size

    def _preempt(self, position: int) -> None:
        """Takes blocks and seat away; outputs stay. The caller calls `_leave` when it is done with positions."""
        table = self._table
        sequence = table.running[position]
        self.blocks.release(table.blocks_of(position))
        sequence.tokens = table.known(position).copy()
        sequence.num_lost = int(table.computed[position])
        sequence.kv = "local" if sequence.kv == "remote" else sequence.kv
        self._line.push_preempted(sequence)
        self._events.preempted.append(sequence.request.key)

    def _leave(self, positions: Iterable[int]) -> None:
        """Unseats sequences, whose blocks somebody else has or nobody."""
        positions = list(positions)
        if self._num_offers:
            self._num_offers -= sum(self._table.running[position].kv == "offer" for position in positions)
        self._table.leave(positions)

    def _hash_running(self, num: Int32) -> None:
        """Makes the blocks findable that the tokens just placed fill up."""
        table, count = self._table, len(num)
        filled = np.minimum(table.computed[:count] + num, table.tokens[:count])
        for position in np.flatnonzero(filled >= table.edge[:count]).tolist():
            self._hash(position, int(filled[position]))

    def _hash(self, position: int, filled: int) -> None:
        table, size = self._table, self.config.block_size
        sequence = table.running[position]
        start, end = int(table.edge[position]) // size - 1, filled // size
        sequence.extend_hashes(table.known(position), end, size)
        for block_hash, block in zip(sequence.hashes[start:end], table.blocks_of(position)[start:end].tolist(), strict=True):
            self.blocks.insert(block_hash, block)
        table.edge[position] = (end + 1) * size

    def _has_seat(self) -> bool:
        return len(self._table) < self.config.max_num_seqs and self._table.has_row

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _enter(self, sequence: Sequence) -> int:
        """Seats an arrived sequence; its next token's slot is reserved already. Returns the tokens it computes: 1."""
        self._seat(sequence, sequence.num_first, np.array(sequence.blocks, np.int32))
        self._note_admission(sequence, sequence.num_cached)
        sequence.blocks = []
        return 1

    def _serve_line(self, budget: int, alone: bool, newcomers: list[int]) -> None:
        """Admits and reserves from the head of the line until somebody does not fit. Appends the tokens of each admitted one."""
        while (sequence := self._line.head()) is not None:
            if sequence.kv == "remote":
                if not self._reserve(sequence):
                    return
                self._line.pop()
                continue
            if self._num_blocks(len(sequence.tokens)) > self.blocks.num_usable:
                self._line.pop()
                del self._live[sequence.request.key]
                self._events.ended.append((sequence.request.key, "length"))
                continue
            if budget <= 0 or not self._has_seat():
                return
            num = self._admit(sequence, budget, alone)
            if num == 0:
                return
            budget -= num
            newcomers.append(num)

    def _admit(self, sequence: Sequence, budget: int, alone: bool) -> int:
        """Moves the head of the line into the batch. Returns its tokens in this step; 0: it does not fit."""
        config, blocks, known = self.config, self.blocks, len(sequence.tokens)
        hits = self._lookup(sequence, known - 1)
        cached = len(hits) * config.block_size
        num = known - cached
        if config.long_prefill_token_threshold and not alone:
            num = min(num, config.long_prefill_token_threshold)
        if not config.enable_chunked_prefill and budget < num <= config.max_num_batched_tokens:
            return 0
        num = min(num, budget)
        first = self._num_blocks(cached + num)
        full = first if config.prompt_reservation == "none" else self._num_blocks(known)
        if not self._fits(full, hits):
            return 0
        self._line.pop()
        blocks.acquire(hits)
        fresh = blocks.allocate((full if config.prompt_reservation == "hold" else first) - len(hits))
        position = self._seat(sequence, cached, np.append(np.array(hits, np.int32), fresh))
        self._note_admission(sequence, cached)
        if config.enable_prefix_caching and cached + num >= self._table.edge[position]:
            self._hash(position, cached + num)
        return num

    def _reserve(self, sequence: Sequence) -> bool:
        """Takes a remote request's whole destination, the slot of its next token included. False: it does not fit."""
        num_tokens = self._num_remote_tokens(sequence.request)
        hits = self._lookup(sequence, sequence.num_first)
        count = self._num_blocks(num_tokens)
        if not self._fits(count, hits):
            return False
        self.blocks.acquire(hits)
        sequence.blocks = hits + self.blocks.allocate(count - len(hits)).tolist()
        sequence.num_published = len(hits)
        sequence.num_cached = len(hits) * self.config.block_size
        sequence.stage = "reserved"
        self._num_reserved += 1
        self._events.reserved.append(Reserved(sequence.request.key, list(sequence.blocks), sequence.num_cached))
        return True

    @staticmethod
    def _num_remote_tokens(request: Request) -> int:
        num_prompt = len(request.prompt_token_ids)
        return min(num_prompt + 1, num_prompt + request.max_tokens - 1)

    def _lookup(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        """Cached blocks of its known tokens, covering at most `max_num_tokens`."""
        if not self.config.enable_prefix_caching:
            return []
        limit = max_num_tokens // self.config.block_size
        sequence.extend_hashes(sequence.tokens, limit, self.config.block_size)
        return self.blocks.lookup(sequence.hashes, limit)

    def _fits(self, count: int, hits: list[int]) -> bool:
        """Whether `count` blocks, `hits` among them, can be taken, with the watermark to spare while anything runs."""
        needed = count - len(hits) + self.blocks.num_free_among(hits)
        return needed + (self._spare_blocks if len(self._table) else 0) <= self.blocks.num_free

    def _seat(self, sequence: Sequence, computed: int, blocks: Int32) -> int:
        size = self.config.block_size
        if sequence.kv == "offer":
            cap = sequence.num_first
        elif self._proposer is not None:
            cap = self.config.max_model_len - 1
        else:
            cap = sequence.limit - 1
        edge = (computed // size + 1) * size if self.config.enable_prefix_caching else NEVER
        self._num_offers += sequence.kv == "offer"
        return self._table.enter(sequence, computed=computed, blocks=blocks, cap=cap, edge=edge)

    def _note_admission(self, sequence: Sequence, num_cached: int) -> None:
        note = self._events.resumed if sequence.admitted else self._events.admitted
        note.append((sequence.request.key, num_cached))
        sequence.admitted = True

    def _launch(self, num: Int32) -> Batch | None:
        """Makes the batch of `num` tokens per running sequence (int32, in running order) and counts them as computed."""
        table, count = self._table, len(num)
        if not num.any():
            return None
        dense = bool(num.all())
        positions = np.arange(count, dtype=np.int32) if dense else np.flatnonzero(num).astype(np.int32)
        num = num[positions]
        computed, tokens = table.computed[positions], table.tokens[positions]
        target = computed + num
        drafts = pending = None
        if self._proposer is not None:
            drafts = np.maximum(target - tokens, 0)
            sample = target >= tokens
        else:
            sample = target == table.goal[positions]
            table.goal[positions] = np.minimum(table.goal[positions] + sample, table.cap[positions])
        if table.flights:
            pending = target > tokens
        batch = Batch(
            step=self._step,
            rows=table.row[positions],
            num_scheduled=num,
            num_computed=computed,
            sample=sample,
            token_ids=table.token_ids,
            block_tables=table.block_tables,
            request_ids=table.request_ids if dense else [table.request_ids[position] for position in positions.tolist()],
            sampling=self._sampling,
            num_drafts=drafts,
            pending=pending,
        )
        self._step += 1
        table.computed[positions] = target
        table.flights.append(Flight(batch, positions))
        self.blocks.step_scheduled()
        return batch

    # ---- commit

    def commit(self, output: StepOutput) -> Committed:
        """Applies the output of the oldest batch in flight. Raises ProtocolError if it does not match the batch."""
        table = self._table
        if not table.flights:
            raise ProtocolError("a commit without a batch in flight")
        flight = table.flights.popleft()
        batch, positions = flight.batch, flight.positions
        if len(output.counts) != len(batch.rows) or not np.array_equal(output.counts > 0, batch.sample):
            raise ProtocolError(f"step {batch.step}: tokens for {int((output.counts > 0).sum())} of {int(batch.sample.sum())} sequences")
        self.blocks.step_committed()
        table.committed(batch.step)
        sampled = np.flatnonzero(batch.sample & (positions >= 0))
        progressed = []
        if self._num_offers:
            for index in np.flatnonzero(~batch.sample & (positions >= 0)).tolist():
                sequence = table.running[positions[index]]
                if sequence.kv == "offer":
                    progressed.append((sequence.request.key, int(batch.num_computed[index] + batch.num_scheduled[index])))
        committed = self._append_tokens(batch, positions[sampled], output.token_ids[sampled], output.counts[sampled])
        committed.progressed = progressed
        return committed

    def _append_tokens(self, batch: Batch, positions: Int32, columns: Int32, counts: Int32) -> Committed:
        """Makes sampled tokens known and takes complete sequences out.

        `positions`: int32 [R]; `columns`: int32 [R, K], row i valid in its first `counts[i]` columns.
        """
        table = self._table
        before, rows = table.tokens[positions], table.row[positions]
        kept, stopped = self._cut_at_end(positions, columns, counts, table.limit[positions] - before)
        for column in range(columns.shape[1]):
            have = kept > column
            if have.all():
                table.token_ids[rows, before + column] = columns[:, column]
            else:
                table.token_ids[rows[have], before[have] + column] = columns[have, column]
        after = before + kept
        table.tokens[positions] = after
        done = stopped | (after >= table.limit[positions])
        if self._num_offers:
            done |= np.array([table.running[position].kv == "offer" for position in positions.tolist()], np.bool_)
        committed = Committed(
            batch=batch,
            slots=table.slot[positions],
            attempts=table.attempt[positions],
            offsets=before + table.base[positions],
            counts=kept,
            token_ids=columns[:, 0].copy() if columns.shape[1] == 1 else columns[np.arange(columns.shape[1]) < kept[:, None]],
        )
        if table.fresh[positions].any():
            self._note_first(committed, positions)
        if self._proposer is not None:
            table.computed[positions] = after - 1
            self._propose(self._proposer, positions[~done])
        if done.any():
            self._finish(committed, positions[done], stopped[done])
        return committed

    def _cut_at_end(self, positions: Int32, columns: Int32, counts: Int32, room: Int32) -> tuple[Int32, npt.NDArray[np.bool_]]:
        """How many of each row's tokens belong to its answer, and whether the last of them is a stop token."""
        table = self._table
        stops = np.zeros(columns.shape, np.bool_)
        for token_id in self._eos_token_ids:
            stops |= columns == token_id
        if self._eos_token_ids:
            stops[table.ignore_eos[positions] > 0] = False
        own_stops = table.own_stops[positions]
        for index in np.flatnonzero(own_stops).tolist():
            stop_token_ids = table.running[positions[index]].stop_token_ids
            stops[index] |= [token_id in stop_token_ids for token_id in columns[index].tolist()]
        until_stop = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, NEVER).astype(np.int32)
        kept = np.minimum(np.minimum(counts, room), until_stop).astype(np.int32)
        return kept, kept == until_stop

    def _note_first(self, committed: Committed, positions: Int32) -> None:
        """Marks first tokens; the row of a remote sequence gets the one its prefill engine sampled in front."""
        table = self._table
        starts = np.cumsum(committed.counts) - committed.counts
        where: list[int] = []
        tokens: list[int] = []
        for index in np.flatnonzero(table.fresh[positions]).tolist():
            sequence = table.running[positions[index]]
            committed.first.append(sequence.request.key)
            if sequence.first_token_id is not None:
                where.append(int(starts[index]))
                tokens.append(sequence.first_token_id)
                committed.offsets[index] -= 1
                committed.counts[index] += 1
                sequence.first_token_id = None
        table.fresh[positions] = 0
        if where:
            committed.token_ids = np.insert(committed.token_ids, where, tokens).astype(np.int32)

    def _propose(self, proposer: Proposer, positions: Int32) -> None:
        table, config = self._table, self.config
        for position in positions.tolist():
            sequence, num_tokens = table.running[position], int(table.tokens[position])
            room = min(sequence.limit - num_tokens - 1, config.num_speculative_tokens)
            drafts = proposer.propose(sequence.request.key, table.known(position), max(room, 0)) if sequence.kv != "offer" else []
            drafts = drafts[: config.max_model_len - num_tokens]
            table.token_ids[table.row[position], num_tokens : num_tokens + len(drafts)] = drafts
            table.goal[position] = min(num_tokens + len(drafts), int(table.cap[position]))

    def _finish(self, committed: Committed, positions: Int32, stopped: npt.NDArray[np.bool_]) -> None:
        table = self._table
        for position, stop in zip(positions.tolist(), stopped.tolist(), strict=True):
            sequence = table.running[position]
            key, blocks = sequence.request.key, table.blocks_of(position)
            reason: FinishReason = "stop" if stop else "length"
            del self._live[key]
            if sequence.kv == "offer":
                complete = stop or int(table.tokens[position]) >= sequence.limit
                first_token_id = int(table.known(position)[-1])
                committed.prompts.append(PromptDone(key, first_token_id, blocks.tolist(), reason if complete else None))
                self.blocks.hand_over(len(blocks))
            else:
                committed.finished.append(Finished(key, sequence.request.slot, reason))
                self.blocks.release(blocks)
        self._leave(positions.tolist())

    def check_idle(self) -> None:
        """When nothing is live, in flight or owned outside, everything is back where it started. Raises ProtocolError."""
        self.blocks.check()
        if not self.idle:
            return
        self._table.check_empty()
        if len(self._line) or self._arrived or self._num_reserved or self._num_unoffered or self._num_offers:
            raise ProtocolError("an idle scheduler still counts requests")
        if not self.blocks.num_external and self.blocks.num_free != self.blocks.num_usable:
            raise ProtocolError(f"{self.blocks.num_usable - self.blocks.num_free} blocks are lost")
