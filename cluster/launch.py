"""What Ray is given to make a router, a door or an engine: an actor's class, and the arguments of its constructor.

The imports of this module take a while, which is why `cluster/serve.py` imports it while Ray starts.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster import build
from cluster.config import ClusterConfig
from cluster.ray_handles import Mailbox
from decode_pool.actor import DecodeActor
from prefill_pool.actor import PrefillActor
from protocol.messages import Address, PoolName
from router.actor import RouterActor
from router.config import Ports
from router.door_actor import DoorActor

Parts = tuple[type, tuple[object, ...]]


def router(
    config: ClusterConfig, address: Address, mailbox: Mailbox, prefix: str, *, ports: Ports, vocab_size: int
) -> Parts:
    return RouterActor, (*_served(config, address, ports, vocab_size), prefix, mailbox)


def door(config: ClusterConfig, address: Address, prefix: str, *, ports: Ports, vocab_size: int) -> Parts:
    return DoorActor, (*_served(config, address, ports, vocab_size), prefix)


def _served(config: ClusterConfig, address: Address, ports: Ports, vocab_size: int) -> tuple[object, ...]:
    model_dir = Path(config.model) if config.model is not None else None
    return address, config.log_level, replace(config.router, **ports._asdict()), model_dir, vocab_size


def engine(
    pool: PoolName, config: ClusterConfig, address: Address, mailbox: Mailbox, prefix: str, cpus: frozenset[int] | None
) -> Parts:
    """`cpus` are the engine's own; None: it may run on any."""
    kind, make = (PrefillActor, build.build_prefill) if pool == "prefill" else (DecodeActor, build.build_decode)
    made = partial(build.on_cores, cpus, partial(make, config, address, mailbox, prefix))
    return kind, (address, config.log_level, made)
