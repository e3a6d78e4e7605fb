"""What the parts of the scheduler share: placement.py serves the running, admission.py those who come, results.py those
who go.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.config import EngineConfig
from engine.scheduler import loops_sequences
from engine.scheduler.block_manager import BlockManager
from engine.scheduler.host_pool import HostPool
from engine.scheduler.loops_sequences import EosTokenIds
from engine.scheduler.outcome import Events
from engine.scheduler.preemption import Costs
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_table import SequenceTable
from engine.scheduler.thrash import ThrashMeter
from engine.scheduler.waiting_queue import WaitingQueue
from protocol.arrays import Int32
from protocol.messages import RequestKey


class Proposer(Protocol):
    """Guesses the next tokens of a sequence."""

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        """`token_ids`: all known tokens, not to be kept. Returns the drafts, at most `max_num_drafts`."""
        ...


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    config: EngineConfig
    blocks: BlockManager
    table: SequenceTable
    waiting: WaitingQueue
    eos_token_ids: EosTokenIds
    proposer: Proposer | None
    """None: no drafts."""
    live: dict[RequestKey, Sequence] = field(default_factory=dict)
    """Every request from `add` to its end."""
    arrived: deque[Sequence] = field(default_factory=deque)
    """All KV there, no seat yet; first come, first served."""
    events: Events = field(default_factory=Events)
    num_unoffered: int = 0
    num_reserved: int = 0
    num_producers: int = 0
    """Running sequences whose KV is handed over after the prompt."""
    num_recomputed_tokens: int = 0
    num_padding_tokens: int = 0
    thrash: ThrashMeter | None = None
    """None: not measured."""
    host: HostPool = field(default_factory=lambda: HostPool(0))
    costs: Costs = field(default_factory=Costs)
    """Kept up to date in preemption mode auto alone."""
    prefill_room_blocks: int = 0
    """Blocks that the prefill pool could still take, by the router's last word, less what was returned to it since."""
    prefill_max_tokens: int = 0
    """Most known tokens of a sequence that a prefill engine can take."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(block, host block) that the batch being built copies first."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block) that it copies next."""

    def padding(self, num_decodes: int) -> int:
        """Tokens that fill a step of decodes alone up to the next captured size; 0 beyond the largest."""
        return next((size - num_decodes for size in self.config.cuda_graph_sizes if size >= num_decodes), 0)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.config.block_size)

    def has_seat(self) -> bool:
        return len(self.table) < self.config.max_num_seqs and self.table.has_row

    @property
    def closed(self) -> bool:
        """Preemptions cost too much: nobody of the queue enters beside those that run or have a destination."""
        if self.thrash is None or not len(self.table):
            return False
        return len(self.table) + self.num_reserved + len(self.arrived) >= self.thrash.seats

    def leave(self, positions: Iterable[int]) -> None:
        """Unseats sequences whose blocks have been released or handed over. Positions change."""
        positions = list(positions)
        if self.num_producers:
            self.num_producers -= sum(self.table.running[position].kv == "producer" for position in positions)
        self.table.leave(positions)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Gives up its KV on the host."""
        self.host.release(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped = [], 0

    def cache_full_blocks(self, first: int, end: int) -> None:
        """Makes the blocks findable that the tokens just placed for the positions `first` to `end` - 1 fill up."""
        table, arrays = self.table, self.blocks.arrays
        known, chains = table.blocks_of_tokens, table.chains
        loops_sequences.cache_full_blocks(
            *arrays, table.state, table.block_tables, known, chains, first, end, table.words
        )
