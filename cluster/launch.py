"""What Ray is given to make a router or an engine: an actor's class, and the arguments of its constructor.

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

Parts = tuple[type, tuple[object, ...]]


def router(config: ClusterConfig, address: Address, mailbox: Mailbox, *, ports: Ports, vocab_size: int) -> Parts:
    model_dir = Path(config.model) if config.model is not None else None
    router_config = replace(config.router, **ports._asdict())
    return RouterActor, (address, config.log_level, router_config, model_dir, vocab_size, mailbox)


def engine(
    pool: PoolName, config: ClusterConfig, address: Address, mailbox: Mailbox, prefix: str, cpus: frozenset[int] | None
) -> Parts:
    """`cpus` are the engine's own; None: it may run on any."""
    kind, make = (PrefillActor, build.build_prefill) if pool == "prefill" else (DecodeActor, build.build_decode)
    made = partial(build.on_cores, cpus, partial(make, config, address, mailbox, prefix))
    return kind, (address, config.log_level, made)
