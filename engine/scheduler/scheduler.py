"""One engine's pass: which tokens of which sequence run next, and what becomes of the result. It knows no phases.

A sequence has `tokens` known and `computed` done; each step closes some of that gap. One step:

 1. `schedule` serves running sequences in admission order (placement.py), then arrived ones, whose KV came from
    elsewhere, then the waiting queue (admission.py). All share one budget of tokens, in which one token is set aside
    for each running answer and for each arrived sequence that will get a seat. A running sequence that finds no block
    evicts another one; preemption.py says how that one gets its KV back. A step that evicted admits nobody from the
    queue. launch.py makes the batch.
 2. The runner executes the batch. Meanwhile `schedule` may be called once more: tokens that are still being sampled are
    placeholders then. A step that cannot be executed is taken back by failed_step.py.
 3. `commit` makes sampled tokens known; sequences that are complete leave and free their blocks (results.py).

The row and the blocks of a sequence that leaves while steps are in flight stay unused until those steps have committed.
"""

from typing import cast

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler import loops_step
from engine.scheduler.admission import admit_waiting, check_servable, seat_arrived
from engine.scheduler.block_manager import BlockManager
from engine.scheduler.failed_step import forget_failed_step
from engine.scheduler.host_pool import HostPool
from engine.scheduler.launch import launch
from engine.scheduler.loops_step import EosTokenIds
from engine.scheduler.outcome import Committed, Events, Finished, PromptDone, Reserved
from engine.scheduler.placement import place_running, step_budget
from engine.scheduler.results import commit_step
from engine.scheduler.sequence import Request, Sequence
from engine.scheduler.sequence_table import SequenceTable
from engine.scheduler.state import Proposer, SchedulerState
from engine.scheduler.thrash import ThrashMeter
from engine.scheduler.waiting_queue import WaitingQueue
from protocol.arrays import Int32
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
        """`fingerprint` names the model in block hashes. The `proposer` is asked only if the config allows drafts.
        Without a `clock` thrashing is not measured, and never closes admission."""
        loops_step.compile_all()
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

    # ---- counts

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and consumers that have not been offered yet."""
        return len(self._state.waiting) + self._state.num_unoffered

    @property
    def num_running(self) -> int:
        return len(self._state.table)

    @property
    def num_reserved(self) -> int:
        """Requests that own a destination which is not complete yet."""
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
        """(tokens, host blocks that hold their KV) of every swapped sequence, also while the copy is still in flight.
        Tests and the simulator ask for it.
        """
        waiting = [sequence for sequence in self._state.live.values() if sequence.host_blocks]
        return [(sequence.tokens[: sequence.num_swapped], sequence.host_blocks) for sequence in waiting]

    @property
    def num_free_host_blocks(self) -> int:
        return self._state.host.num_free

    @property
    def idle(self) -> bool:
        """True while no request is live and no step is in flight."""
        return not self._state.live and not self._state.table.in_flight

    @property
    def running_ids(self) -> list[str]:
        """Request ids in running order."""
        return self._state.table.request_ids

    @property
    def arrived(self) -> list[Sequence]:
        """Sequences whose KV is all there and that wait for a seat, first come first. For checks."""
        return list(self._state.arrived)

    @property
    def has_seat(self) -> bool:
        """True if one more sequence could run. For checks."""
        return self._state.has_seat()

    @property
    def passed_over(self) -> list[str]:
        """Running answers that got no token in the newest step in flight. For checks, right after `schedule`."""
        return self._state.table.passed_over()

    @property
    def waiting_ids(self) -> list[str]:
        """Request ids of the queue, head first."""
        return [sequence.request.key.request_id for sequence in self._state.waiting.in_order()]

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Takes a request in. Raises InvalidRequest if it can never be served here, and ProtocolError if its key
        is live already."""
        state, config = self._state, self.config
        check_servable(state, request)
        if request.key in state.live:
            raise ProtocolError(f"{request.key} is live already")
        sequence = Sequence.of(request, fingerprint=self._fingerprint, max_model_len=config.max_model_len)
        sequence.queue_key = state.waiting.next_key(sequence)
        if config.enable_prefix_caching:
            state.table.extend_chain(sequence, sequence.num_first // config.block_size)
        state.live[request.key] = sequence
        if request.kv == "consumer":
            state.num_unoffered += 1
        else:
            state.waiting.push(sequence)

    def set_prefill_room(self, num_blocks: int, max_tokens: int) -> None:
        """Says what mode remote may return: at most `num_blocks` blocks, of sequences with at most `max_tokens` known
        tokens. It is a hint, and 0 without a prefill pool.
        """
        self._state.prefill_room_blocks, self._state.prefill_max_tokens = num_blocks, max_tokens

    def offer(self, key: RequestKey) -> None:
        """The first handoff of a consumer is here: from now on the request may reserve. Nothing happens for an unknown
        key or at a later offer.
        """
        sequence = self._state.live.get(key)
        if sequence is not None and sequence.stage == "unoffered":
            self._state.num_unoffered -= 1
            self._state.waiting.push(sequence)

    def publish(self, key: RequestKey, num_tokens: int) -> None:
        """Received tokens below `num_tokens` are verified: their whole blocks may be hit from now on."""
        sequence = self._state.live.get(key)
        if sequence is None or sequence.stage != "reserved" or not self.config.enable_prefix_caching:
            return
        start, end = sequence.num_published, min(num_tokens, sequence.num_first) // self.config.block_size
        if end > start:
            self.blocks.insert(sequence.chain[start + 1 : end + 1], sequence.blocks[start:end])
            sequence.num_published = end

    def arrive(self, key: RequestKey, first_token_id: int, first_logprobs: TokenLogprobs | None = None) -> None:
        """All KV of a reserved request is there and verified: it decodes as soon as it finds a seat. Nothing happens
        for an unknown key. Raises ProtocolError if the request has reserved nothing.
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
        """Forgets a request and frees its blocks; those that a step in flight uses are free when it has committed.
        Nothing happens for an unknown key.
        """
        self.blocks.release(self._state.forget(key))

    def detach(self, key: RequestKey) -> list[int]:
        """Forgets a request without freeing its blocks: the caller owns the returned ones (in order) and gives them to
        `blocks.free` later.
        """
        blocks = self._state.forget(key)
        self.blocks.hand_over(len(blocks))
        return cast(list[int], blocks.tolist())

    def block_ids(self, key: RequestKey) -> list[int]:
        """Blocks of a running request, in order. Raises KeyError if it is not live."""
        table = self._state.table
        return cast(list[int], table.blocks_of(table.running.index(self._state.live[key])).tolist())

    # ---- steps

    def schedule(self) -> Batch | None:
        """Builds the next batch. Returns None if nothing can be executed now; with a step in flight that may also mean:
        commit first, then call again.
        """
        state = self._state
        table = state.table
        if table.in_flight and (
            len(table.in_flight) > 1 or state.proposer is not None or table.in_flight[0].batch.swap_out is not None
        ):
            # Blocks that are still to be copied out look free, and a pull into one could not wait for the copy.
            return None
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
        return launch(state)

    def take_events(self) -> Events:
        """What the schedules since the last call have decided."""
        events, self._state.events = self._state.events, Events()
        return events

    def failures(self, output: StepOutput) -> list[tuple[RequestKey, str]]:
        """Requests that the output of the oldest step in flight says cannot go on, and why. The caller aborts or
        detaches them before it commits: then nothing of the step counts for them.
        """
        if not output.failures:
            return []
        running, positions = self._state.table.running, self._state.table.in_flight[0].positions
        at = [(int(positions[index]), error) for index, error in output.failures.items()]
        return [(running[position].request.key, error) for position, error in at if position >= 0]

    def commit(self, output: StepOutput) -> Committed:
        """Applies the output of the oldest batch in flight. Raises ProtocolError if it does not match the batch."""
        return commit_step(self._state, output)

    def fail_step(self) -> list[RequestKey]:
        """The oldest step in flight could not be executed. Returns the requests that are spoilt by that; the caller
        aborts or detaches them all.
        """
        return forget_failed_step(self._state)

    def check_idle(self) -> None:
        """Raises ProtocolError if an idle scheduler has lost anything. Does nothing while it is not idle."""
        if self.idle:
            self._state.check_idle()
