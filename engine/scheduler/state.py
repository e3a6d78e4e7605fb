"""The state that the parts of the scheduler share. placement.py serves running sequences, admission.py lets others in,
launch.py makes the batch, and results.py lets complete sequences go.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.config import EngineConfig
from engine.scheduler import loops_sequences
from engine.scheduler.block_manager import NO_BLOCKS, BlockManager
from engine.scheduler.host_pool import HostPool
from engine.scheduler.loops_step import EosTokenIds
from engine.scheduler.outcome import Events
from engine.scheduler.preemption import Costs
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_table import SequenceTable
from engine.scheduler.thrash import ThrashMeter
from engine.scheduler.waiting_queue import WaitingQueue
from protocol.arrays import Int32
from protocol.errors import ProtocolError
from protocol.messages import RequestKey


class Proposer(Protocol):
    """Guesses the next tokens of a sequence."""

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        """Returns at most `max_num_drafts` drafts. `token_ids` are all known tokens; the array must not be kept."""
        ...


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    config: EngineConfig
    blocks: BlockManager
    table: SequenceTable
    waiting: WaitingQueue
    eos_token_ids: EosTokenIds
    proposer: Proposer | None
    """None where nothing is drafted."""
    live: dict[RequestKey, Sequence] = field(default_factory=dict)
    """Every request from `add` to its end."""
    arrived: deque[Sequence] = field(default_factory=deque)
    """Sequences whose KV is all there and that have no seat yet; first come, first served."""
    events: Events = field(default_factory=Events)
    num_unoffered: int = 0
    num_reserved: int = 0
    num_producers: int = 0
    """Running sequences whose KV is handed over after the prompt."""
    num_recomputed_tokens: int = 0
    num_padding_tokens: int = 0
    thrash: ThrashMeter | None = None
    """None where thrashing is not measured."""
    host: HostPool = field(default_factory=lambda: HostPool(0))
    costs: Costs = field(default_factory=Costs)
    """Kept up to date only in preemption mode auto."""
    prefill_room_blocks: int = 0
    """Blocks that the prefill pool could still take: what the router said last, less what was returned since."""
    prefill_max_tokens: int = 0
    """Most known tokens of a sequence that a prefill engine can take."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(block, host block) pairs that the batch being built copies first."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block) pairs that the batch being built copies next."""
    num_steps: int = 0
    """Batches made so far; the number of the next one."""

    def padding(self, num_decodes: int) -> int:
        """Tokens that fill a step of decodes alone up to the next captured size; 0 beyond the largest size."""
        return next((size - num_decodes for size in self.config.cuda_graph_sizes if size >= num_decodes), 0)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.config.block_size)

    def has_seat(self) -> bool:
        return len(self.table) < self.config.max_num_seqs and self.table.has_row

    @property
    def closed(self) -> bool:
        """True while preemptions cost too much: what runs or has a destination fills all seats, and the queue waits."""
        if self.thrash is None or not len(self.table):
            return False
        return len(self.table) + self.num_reserved + len(self.arrived) >= self.thrash.seats

    def leave(self, positions: Iterable[int]) -> None:
        """Unseats sequences whose blocks have been released or handed over. Positions change."""
        positions = list(positions)
        if self.num_producers:
            self.num_producers -= sum(self.table.running[position].kv == "producer" for position in positions)
        self.table.leave(positions)

    def forget(self, key: RequestKey) -> Int32:
        """Takes a request out, wherever it stands. Returns the blocks that it owned; none for an unknown key."""
        sequence = self.live.pop(key, None)
        if sequence is None:
            return NO_BLOCKS
        if sequence.stage == "unoffered":
            self.num_unoffered -= 1
        elif sequence.stage == "waiting":
            self.waiting.discard(sequence)
            self.drop_swapped(sequence)
        elif sequence.stage == "reserved":
            self.num_reserved -= 1
        elif sequence.stage == "arrived":
            self.arrived.remove(sequence)
        else:
            position = self.table.running.index(sequence)
            blocks = self.table.blocks_of(position)
            self.leave([position])
            return blocks
        return sequence.blocks

    def drop_swapped(self, sequence: Sequence) -> None:
        """Gives up the KV that a sequence has on the host."""
        self.host.release(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped = [], 0

    def cache_full_blocks(self, first: int, end: int) -> None:
        """Makes the blocks findable that are full with the tokens just placed for positions `first` to `end` - 1."""
        table, arrays = self.table, self.blocks.arrays
        known, chains = table.blocks_of_tokens, table.chains
        loops_sequences.cache_full_blocks(
            *arrays, table.state, table.block_tables, known, chains, first, end, table.words
        )

    def check_idle(self) -> None:
        """Raises ProtocolError unless a scheduler in which nothing is live or in flight is back where it started. Free
        blocks are compared only while nobody outside owns any.
        """
        self.blocks.check()
        self.table.check_empty()
        if len(self.waiting) or self.arrived or self.num_reserved or self.num_unoffered or self.num_producers:
            raise ProtocolError("an idle scheduler still counts requests")
        if not self.blocks.num_external and self.blocks.num_free != self.blocks.num_usable:
            raise ProtocolError(f"{self.blocks.num_usable - self.blocks.num_free} blocks are lost")
        if self.host.num_free != self.host.num_blocks:
            raise ProtocolError(f"{self.host.num_blocks - self.host.num_free} host blocks are lost")
