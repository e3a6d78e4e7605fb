"""One engine of a simulated run: the real service, scheduler and block manager, with models of the runner and of
the transport.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decode_pool.service import DecodeService
from engine.config import EngineConfig
from engine.parts import EngineParts, assemble
from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.scheduler import Proposer, Scheduler
from kv_transfer.device.device import KVCache
from kv_transfer.lease import LeaseTable, Words
from kv_transfer.transports.local import LocalConnector, LocalNetwork
from prefill_pool.service import PrefillService
from protocol.clock import Clock
from protocol.delivery import Incoming, Outgoing
from protocol.messages import Address, Envelope, PoolName
from protocol.router_link import LinkConfig
from simulator.scenario import Scenario

LAYOUT = b"simulated-layout"
LINK = LinkConfig(status_interval_s=1.0, router_timeout_s=3.0)
"""An engine gives a silent router up after a time in which requests are still open: with 10 s hardly one would be."""

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
    endpoint: bytes
    """Names a prefill engine's cache in the network."""
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
    role: PoolName = "prefill" if address.replica_id.startswith("prefill") else "decode"
    config = scenario.prefill if role == "prefill" else scenario.decode
    cache = np.zeros((config.num_blocks, config.block_size), np.int64)
    endpoint = f"{address.replica_id}@{address.epoch}".encode()
    engine = assemble(
        config,
        role=role,
        address=address,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        fingerprint=LAYOUT,
        link=LINK,
        clock=clock,
        endpoint=endpoint,
        proposer=proposer,
    )
    replica = Replica(
        address=address,
        config=config,
        cache=cache,
        words=np.zeros(config.num_blocks, np.uint64) if role == "prefill" else None,
        scheduler=engine.scheduler,
        runner=scenario.runner(cache, num_host_blocks=config.num_host_blocks),
        incoming=Incoming(address, clock),
        outgoing=Outgoing(address),
        endpoint=endpoint,
    )
    replica.service = _service(scenario, replica, engine, network, leases_of)
    return replica


def _service(
    scenario: Scenario, replica: Replica, engine: EngineParts, network: LocalNetwork, leases_of: LeasesOf
) -> PrefillService | DecodeService:
    blocks, config = replica.cache.view(np.uint8), scenario.transfer
    cache = KVCache.in_host_memory(blocks)
    if replica.words is None:
        return DecodeService(engine, transport=LocalConnector(network, blocks), config=config, cache=cache)
    network.export(replica.endpoint, blocks, replica.words)
    return PrefillService(engine, leases=leases_of(replica, replica.words), config=config, cache=cache)
