"""One engine of a simulated run: the real service, scheduler and block manager, with models of the runner and of
the transport.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decode_pool.service import DecodeService
from engine.config import EngineConfig
from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.scheduler import Proposer, Scheduler
from kv_transfer.checksum import checksum_of
from kv_transfer.lease import LeaseTable, Words
from kv_transfer.transports.local import LocalNetwork, LocalTransport
from prefill_pool.service import PrefillService
from protocol.clock import Clock
from protocol.delivery import Incoming, Outgoing
from protocol.messages import Address, Envelope, Hello
from protocol.router_link import LinkConfig
from simulator.scenario import Scenario

LAYOUT = b"simulated-layout"
LINK = LinkConfig(status_interval_s=1.0, router_timeout_s=10.0)

LeasesOf = Callable[["Replica", Words], LeaseTable]


@dataclass(slots=True, eq=False)
class Replica:
    """One engine in one epoch. The event queue does the job of its shell."""

    address: Address
    config: EngineConfig
    cache: np.ndarray
    """The KV, int64 [num_blocks, block_size]."""
    words: Words | None
    """The lease words of a prefill engine; None for a decode engine."""
    scheduler: Scheduler
    runner: ArithmeticRunner
    incoming: Incoming
    outgoing: Outgoing
    service: PrefillService | DecodeService = field(init=False)
    executing: deque[tuple[Batch, float]] = field(default_factory=deque)
    """(batch, seconds that it takes) of the steps in flight, the running one first."""
    doing: Envelope | None = None
    """The message that its service is handling; None during a tick or a step."""
    alive: bool = True
    draining: bool = False
    leaving: bool = False
    """True if it drains for good and gets no successor."""

    @property
    def name(self) -> str:
        return self.address.replica_id

    @property
    def is_prefill(self) -> bool:
        return self.words is not None

    @property
    def endpoint(self) -> bytes:
        return f"{self.address.replica_id}@{self.address.epoch}".encode()


def build(
    scenario: Scenario,
    address: Address,
    *,
    network: LocalNetwork,
    clock: Clock,
    proposer: Proposer | None,
    leases_of: LeasesOf,
) -> Replica:
    """Makes a new engine that nobody knows yet. Its name says whether it prefills or decodes."""
    is_prefill = address.replica_id.startswith("prefill")
    config = scenario.prefill if is_prefill else scenario.decode
    cache = np.zeros((config.num_blocks, config.block_size), np.int64)
    scheduler = Scheduler(
        config,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        fingerprint=LAYOUT,
        eos_token_ids=(),
        proposer=proposer,
        clock=clock,
    )
    replica = Replica(
        address=address,
        config=config,
        cache=cache,
        words=np.zeros(config.num_blocks, np.uint64) if is_prefill else None,
        scheduler=scheduler,
        runner=scenario.runner(cache, num_host_blocks=config.num_host_blocks),
        incoming=Incoming(address, clock),
        outgoing=Outgoing(address),
    )
    replica.service = _service(scenario, replica, network, clock, leases_of)
    return replica


def _service(
    scenario: Scenario, replica: Replica, network: LocalNetwork, clock: Clock, leases_of: LeasesOf
) -> PrefillService | DecodeService:
    config, blocks = replica.config, replica.cache.view(np.uint8)
    hello = Hello(
        role="prefill" if replica.is_prefill else "decode",
        layout_fingerprint=LAYOUT,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_prompt_tokens=config.max_prompt_tokens(config.num_blocks),
        endpoint=replica.endpoint,
    )
    checksum = checksum_of(blocks) if scenario.transfer.checksum else None
    if replica.words is not None:
        network.export(replica.endpoint, blocks, replica.words)
        return PrefillService(
            address=replica.address,
            scheduler=replica.scheduler,
            leases=leases_of(replica, replica.words),
            config=scenario.transfer,
            link=LINK,
            hello=hello,
            clock=clock,
            checksum=checksum,
        )
    return DecodeService(
        address=replica.address,
        scheduler=replica.scheduler,
        transport=LocalTransport(network, blocks),
        config=scenario.transfer,
        link=LINK,
        hello=hello,
        block_bytes=blocks.shape[1],
        clock=clock,
        checksum=checksum,
    )
