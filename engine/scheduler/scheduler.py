"""One engine's pass: which tokens of which sequence run next, and what becomes of the result. Knows no phases.

A sequence has `tokens` known and `computed` done; each step closes some of that gap. One step:

 1. `schedule`: running sequences in admission order (placement.py), then arrived ones, whose KV came from elsewhere,
    then the waiting queue (admission.py), under one budget of tokens, in which each running answer and each arrived one
    with a seat has one for sure. A running one that finds no block evicts another; a step that evicted admits nobody
    from the queue. How the evicted one gets its KV back: preemption.py.
 2. The runner executes the batch. Meanwhile `schedule` may be called once more: tokens still being sampled are
    placeholders.
 3. `commit`: sampled tokens become known; sequences that are complete leave and free their blocks (results.py).

Whatever leaves while steps are in flight keeps its row and blocks out of use until those steps have committed.
"""

from typing import cast

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler import loops_sequences as loops
from engine.scheduler.admission import admit_waiting, check_servable, seat_arrived
from engine.scheduler.block_manager import NO_BLOCKS, BlockManager
from engine.scheduler.host_pool import HostPool
from engine.scheduler.loops_hash import Chain
from engine.scheduler.loops_sequences import EosTokenIds, Positions, Scheduled
from engine.scheduler.outcome import Committed, Events, Finished, PromptDone, Reserved
from engine.scheduler.placement import place_running, step_budget
from engine.scheduler.results import append_tokens
from engine.scheduler.sequence import Request, Sequence
from engine.scheduler.sequence_table import InFlightStep, SequenceTable
from engine.scheduler.state import Proposer, SchedulerState
from engine.scheduler.thrash import ThrashMeter
from engine.scheduler.waiting_queue import WaitingQueue
from protocol.arrays import Int32
from protocol.block_hash import root_hash, to_rows
from protocol.clock import Clock
from protocol.errors import ProtocolError
from protocol.messages import RequestKey, TokenLogprobs

__all__ = ["Committed", "Events", "Finished", "PromptDone", "Proposer", "Reserved", "Scheduler"]


class Scheduler:
    """Plain synchronous state machine; not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        fingerprint: bytes = b"",
        eos_token_ids: tuple[int, ...] = (),
        proposer: Proposer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`fingerprint`: of the model, for block hashes. `proposer`: asked if the config allows drafts. `clock`:
        without one, thrashing is not measured and closes nothing."""
        self.config = config
        self.blocks = BlockManager(num_blocks)
        self._fingerprint = fingerprint
        table = SequenceTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            eos_token_ids=eos_token_ids,
        )
        self._state = SchedulerState(
            config=config,
            blocks=self.blocks,
            table=table,
            waiting=WaitingQueue(config.scheduling_policy, config.priority_aging_s),
            eos_token_ids=EosTokenIds(np.array(eos_token_ids, np.int32)),
            proposer=proposer if config.num_speculative_tokens else None,
            thrash=ThrashMeter(
                clock, window_s=config.thrash_window_s, limit=config.thrash_limit, max_num_seqs=config.max_num_seqs
            )
            if clock and config.thrash_limit
            else None,
            host=HostPool(num_host_blocks),
        )
        self._step = 0

    # ---- counts

    @property
    def num_waiting(self) -> int:
        """In the queue, or consumers not offered yet."""
        return len(self._state.waiting) + self._state.num_unoffered

    @property
    def num_running(self) -> int:
        return len(self._state.table)

    @property
    def num_reserved(self) -> int:
        """Own a destination that is not complete yet."""
        return self._state.num_reserved

    @property
    def num_free_blocks(self) -> int:
        return self.blocks.num_free

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens whose KV preemptions threw away and that had to be computed again, since the start."""
        return self._state.num_recomputed_tokens

    @property
    def num_padding_tokens(self) -> int:
        """Tokens by which steps of decodes alone fell short of a captured size, since the start."""
        return self._state.num_padding_tokens

    @property
    def thrash_ratio(self) -> float:
        """Tokens recomputed per token generated, over `thrash_window_s`; 0 without a clock."""
        return self._state.thrash.ratio if self._state.thrash else 0.0

    @property
    def swapped(self) -> list[tuple[Int32, list[int]]]:
        """(tokens, host blocks that hold their KV) of every swapped sequence, those included whose copy is in flight.
        For checks.
        """
        live = self._state.live.values()
        return [
            (sequence.tokens[: sequence.num_swapped], sequence.host_blocks) for sequence in live if sequence.host_blocks
        ]

    @property
    def num_free_host_blocks(self) -> int:
        return self._state.host.num_free

    @property
    def idle(self) -> bool:
        """Nothing is live and nothing in flight."""
        return not self._state.live and not self._state.table.in_flight

    @property
    def running_ids(self) -> list[str]:
        """In running order."""
        return self._state.table.request_ids

    @property
    def arrived(self) -> list[Sequence]:
        """All their KV is there, a seat is not; who enters first, first. For checks."""
        return list(self._state.arrived)

    @property
    def has_seat(self) -> bool:
        """One more sequence could run. For checks."""
        return self._state.has_seat()

    @property
    def passed_over(self) -> list[str]:
        """Running answers without a token in the newest step in flight. For checks, right after `schedule`."""
        table = self._state.table
        if not table.in_flight or len(table.in_flight[-1].positions) == len(table):
            return []
        answering = table.answering()
        answering[table.in_flight[-1].positions] = False
        return [table.request_ids[position] for position in answering.nonzero()[0].tolist()]

    @property
    def waiting_ids(self) -> list[str]:
        """The queue, head first."""
        return [sequence.request.key.request_id for sequence in self._state.waiting.in_order()]

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Takes a request in. Raises InvalidRequest if it can never be served here."""
        state, config = self._state, self.config
        check_servable(state, request)
        if request.key in state.live:
            raise ProtocolError(f"{request.key} is live already")
        num_prompt = len(request.prompt_token_ids)
        limit = num_prompt + request.max_tokens
        sequence = Sequence(
            request=request,
            kv=request.kv,
            stage="unoffered",
            # How long an answer may grow is for the engine to judge that writes it, not for the one that begins it.
            limit=limit if request.kv == "producer" else min(limit, config.max_model_len),
            chain=Chain(to_rows([root_hash(self._fingerprint, request.cache_salt)])),
            tokens=np.array(
                request.prompt_token_ids, np.int32
            ),  # a copy: the loops take no array that must not be written to
            num_first=num_prompt,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
        )
        sequence.queue_key = state.waiting.next_key(sequence)
        if config.enable_prefix_caching:
            state.table.extend_chain(sequence, num_prompt // config.block_size)
        state.live[request.key] = sequence
        if request.kv == "consumer":
            state.num_unoffered += 1
        else:
            state.waiting.push(sequence)

    def set_prefill_room(self, num_blocks: int, max_tokens: int) -> None:
        """What mode remote may return: so many blocks, of sequences with at most so many known tokens. A hint; 0
        without a prefill pool.
        """
        self._state.prefill_room_blocks, self._state.prefill_max_tokens = num_blocks, max_tokens

    def offer(self, key: RequestKey) -> None:
        """The first handoff of a consumer is here: it may reserve from now on. Unknown key or a later offer:
        no-op.
        """
        sequence = self._state.live.get(key)
        if sequence is not None and sequence.stage == "unoffered":
            self._state.num_unoffered -= 1
            self._state.waiting.push(sequence)

    def publish(self, key: RequestKey, num_tokens: int) -> None:
        """Received tokens below `num_tokens` are verified: whole blocks below it may be hit from now on."""
        sequence = self._state.live.get(key)
        if sequence is None or sequence.stage != "reserved" or not self.config.enable_prefix_caching:
            return
        start, end = sequence.num_published, min(num_tokens, sequence.num_first) // self.config.block_size
        if end > start:
            self.blocks.insert(sequence.chain[start + 1 : end + 1], sequence.blocks[start:end])
            sequence.num_published = end

    def arrive(self, key: RequestKey, first_token_id: int, first_logprobs: TokenLogprobs | None = None) -> None:
        """All KV of a reserved request is there and verified: it decodes as soon as it finds a seat. Unknown key:
        no-op.
        """
        sequence = self._state.live.get(key)
        if sequence is None:
            return
        if sequence.stage != "reserved":
            raise ProtocolError(f"{key} arrived while {sequence.stage}")
        self.publish(key, sequence.num_first)
        sequence.tokens = np.append(sequence.tokens, np.int32(first_token_id))
        sequence.first_token_id, sequence.first_logprobs = first_token_id, first_logprobs
        sequence.stage = "arrived"
        self._state.num_reserved -= 1
        self._state.arrived.append(sequence)

    def abort(self, key: RequestKey) -> None:
        """Forgets a request and frees its blocks, those a step in flight uses when that has committed. Unknown key:
        no-op.
        """
        self.blocks.release(self._forget(key))

    def detach(self, key: RequestKey) -> list[int]:
        """Forgets a request without freeing: the caller owns the returned blocks (in order) and gives them to
        `blocks.free` later.
        """
        blocks = self._forget(key)
        self.blocks.hand_over(len(blocks))
        return cast(list[int], blocks.tolist())

    def block_ids(self, key: RequestKey) -> list[int]:
        """Blocks of a running request, in order. Raises KeyError if it is not live."""
        table = self._state.table
        return cast(list[int], table.blocks_of(table.running.index(self._state.live[key])).tolist())

    def _forget(self, key: RequestKey) -> Int32:
        """Takes a request out wherever it stands. Returns the blocks it owned."""
        state = self._state
        sequence = state.live.pop(key, None)
        if sequence is None:
            return NO_BLOCKS
        if sequence.stage == "unoffered":
            state.num_unoffered -= 1
        elif sequence.stage == "waiting":
            state.waiting.discard(sequence)
            state.drop_swapped(sequence)
        elif sequence.stage == "reserved":
            state.num_reserved -= 1
        elif sequence.stage == "arrived":
            state.arrived.remove(sequence)
        else:
            position = state.table.running.index(sequence)
            blocks = state.table.blocks_of(position)
            state.leave([position])
            return blocks
        return sequence.blocks

    # ---- steps

    def schedule(self) -> Batch | None:
        """Builds the next batch. None: nothing can be executed now, or (with a step in flight) commit first and call
        again.
        """
        state = self._state
        table = state.table
        if table.in_flight and (
            len(table.in_flight) > 1 or state.proposer is not None or table.in_flight[0].batch.swap_out is not None
        ):
            return None  # blocks that are still to be copied out look free: a pull into one could not wait for the copy
        alone = len(table) + len(state.waiting) + len(state.arrived) == 1
        num_preempted = len(state.events.preempted)
        num_promised = min(len(state.arrived), self.config.max_num_seqs - len(table)) if state.arrived else 0
        budget = place_running(state, step_budget(state, num_promised) - num_promised, alone=alone)
        if budget is None:
            return None
        state.cache_full_blocks(0, len(table))
        if state.arrived:
            budget = seat_arrived(state, budget + num_promised)
        preempted = len(state.events.preempted) > num_preempted
        if state.thrash is not None:
            state.thrash.adapt(len(table), preempted=preempted)
        if not preempted:
            admit_waiting(state, budget, alone=alone)
        return self._launch()

    def take_events(self) -> Events:
        """What schedules decided since the last call."""
        events, self._state.events = self._state.events, Events()
        return events

    def _launch(self) -> Batch | None:
        """Makes the batch of the tokens that were placed, and counts them as computed."""
        state, table = self._state, self._state.table
        scheduled = Scheduled(np.empty((loops.NUM_SCHEDULED_LINES, len(table)), np.int32))
        sample = np.empty(len(table), np.bool_)
        size = loops.launch(table.state, int(state.proposer is not None), scheduled, sample)
        if not size and not state.swap_out:
            return None
        positions, num_scheduled = Positions(scheduled[loops.AT_POSITION, :size]), scheduled[loops.NUM_TOKENS, :size]
        ahead = scheduled[loops.NUM_AHEAD, :size]
        request_ids = table.request_ids
        if size < len(table):
            request_ids = [request_ids[position] for position in positions.tolist()]
        batch = Batch(
            step=self._step,
            rows=scheduled[loops.AT_ROW, :size],
            num_scheduled=num_scheduled,
            num_computed=scheduled[loops.NUM_BEFORE, :size],
            sample=sample[:size],
            token_ids=table.token_ids,
            block_tables=table.block_tables,
            request_ids=request_ids,
            sampling=table.sampling if table.sampling.num_special else None,
            num_drafts=ahead if state.proposer is not None else None,
            pending=ahead > 0 if table.in_flight else None,
        )
        if self.config.cuda_graph_sizes and int(num_scheduled.max(initial=0)) == 1:
            state.num_padding_tokens += state.padding(size)
        if state.swap_out or state.swap_in:
            batch.swap_out, batch.swap_in = _pairs(state.swap_out), _pairs(state.swap_in)
            state.swap_out, state.swap_in = [], []
        self._step += 1
        table.in_flight.append(InFlightStep(batch, positions))
        self.blocks.step_scheduled()
        return batch

    def commit(self, output: StepOutput) -> Committed:
        """Applies the output of the oldest batch in flight. Raises ProtocolError if it does not match the batch."""
        state, table = self._state, self._state.table
        if not table.in_flight:
            raise ProtocolError("a commit without a batch in flight")
        in_flight_step = table.in_flight.popleft()
        batch, sampled = in_flight_step.batch, output.counts > 0
        if len(output.token_ids) != len(sampled) or sampled.tobytes() != batch.sample.tobytes():
            raise ProtocolError(
                f"step {batch.step}: tokens for entries {sampled.nonzero()[0]}, wanted for {batch.sample.nonzero()[0]}"
            )
        self.blocks.step_committed()
        table.committed(batch.step)
        progressed = self._progress_of_producers(in_flight_step) if state.num_producers else []
        committed = append_tokens(state, batch, in_flight_step.positions, output)
        committed.progressed = progressed
        if state.thrash is not None:
            state.thrash.add(recomputed=0, generated=len(committed.token_ids))
        if self.config.preemption == "auto":
            state.costs.observe(batch, output)
        return committed

    def _progress_of_producers(self, in_flight_step: InFlightStep) -> list[tuple[RequestKey, int]]:
        batch, table = in_flight_step.batch, self._state.table
        unfinished = (~batch.sample & (in_flight_step.positions >= 0)).nonzero()[0].tolist()
        progress = [(table.running[in_flight_step.positions[index]], index) for index in unfinished]
        done = (batch.num_computed + batch.num_scheduled).tolist()
        return [(sequence.request.key, done[index]) for sequence, index in progress if sequence.kv == "producer"]

    def fail_step(self) -> list[RequestKey]:
        """The oldest step in flight could not be executed: what it and later ones would have computed is no longer
        findable.

        Sequences that it would have copied to the host have lost their KV. Returns the requests that are spoilt: those
        in flight, and those that reserved blocks found while they were being computed. The caller aborts or detaches
        them all.
        """
        table = self._state.table
        if not table.in_flight:
            raise ProtocolError("a failed step without a batch in flight")
        spoilt: dict[RequestKey, None] = {}
        blocks: set[int] = set()
        for in_flight_step in table.in_flight:
            batch, size = in_flight_step.batch, self.config.block_size
            for row, start, num in zip(
                batch.rows.tolist(), batch.num_computed.tolist(), batch.num_scheduled.tolist(), strict=True
            ):
                blocks.update(batch.block_tables[row, start // size : -(-(start + num) // size)].tolist())
            if batch.swap_in is not None:
                blocks.update(batch.swap_in[:, 1].tolist())
            if batch.swap_out is not None:
                self._lose_copies(set(batch.swap_out[:, 1].tolist()))
            spoilt.update(
                dict.fromkeys(
                    table.running[position].request.key
                    for position in in_flight_step.positions.tolist()
                    if position >= 0
                )
            )
        self.blocks.forget(list(blocks))
        spoilt.update(
            {key: None for key, sequence in self._state.live.items() if not blocks.isdisjoint(sequence.blocks.tolist())}
        )
        batch = table.in_flight.popleft().batch
        self.blocks.step_committed()
        table.committed(batch.step)
        return list(spoilt)

    def _lose_copies(self, host_blocks: set[int]) -> None:
        for sequence in self._state.live.values():
            if not host_blocks.isdisjoint(sequence.host_blocks):
                sequence.num_lost = sequence.num_swapped
                self._state.drop_swapped(sequence)

    def check_idle(self) -> None:
        """When nothing is live, in flight or owned outside, everything is back where it started. Raises
        ProtocolError.
        """
        state = self._state
        if not self.idle:
            return
        self.blocks.check()
        state.table.check_empty()
        if len(state.waiting) or state.arrived or state.num_reserved or state.num_unoffered or state.num_producers:
            raise ProtocolError("an idle scheduler still counts requests")
        if not self.blocks.num_external and self.blocks.num_free != self.blocks.num_usable:
            raise ProtocolError(f"{self.blocks.num_usable - self.blocks.num_free} blocks are lost")
        if state.host.num_free != state.host.num_blocks:
            raise ProtocolError(f"{state.host.num_blocks - state.host.num_free} host blocks are lost")


def _pairs(blocks: list[tuple[int, int]]) -> Int32 | None:
    """[n, 2]; None where there is nothing to copy."""
    return np.array(blocks, np.int32) if blocks else None
