"""Chooses the transport. `auto` believes no claim: a candidate is taken when it has moved the peer's nonce from there
to here.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kv_transfer.config import TransferConfig
from kv_transfer.device import topology
from kv_transfer.device.device import Device, DeviceBlocks, Gather
from kv_transfer.endpoint import offers
from kv_transfer.transport import Blocks, Endpoint, Peer, Transport
from kv_transfer.transports.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.host_staged import HostStagedTransport
from kv_transfer.transports.nixl import Memory, NixlTransport
from kv_transfer.transports.shared_memory import SharedMemoryTransport
from protocol.errors import ConfigError, PullFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOST_MEMORY = ("shared_memory", "nixl")
GPU_MEMORY = ("cuda_ipc", "host_staged", "nixl")
"""Transports for a cache there, best first."""


class AutoTransport:
    """Tries `candidates`, best first, with each peer. `name`: the one chosen last, "auto" before."""

    def __init__(
        self,
        candidates: Sequence[Transport],
        absent: Sequence[str] = (),
        facts: Callable[[Endpoint], str] = lambda endpoint: "",
    ) -> None:
        """`absent`: transports that cannot work here, each with its reason. `facts`: what lies between a peer and us,
        for the log.
        """
        self.name = "auto"
        self._candidates, self._absent, self._facts = candidates, absent, facts

    def connect(self, endpoint: Endpoint) -> Peer:
        """Raises PullFailed with every candidate's reason when none works, LayoutMismatch at once: no other transport
        can mend that.
        """
        reasons = []
        for candidate in self._candidates:
            try:
                peer = candidate.connect(endpoint)
            except PullFailed as error:
                reasons.append(f"{candidate.name}: {error}")
                continue
            self.name = candidate.name
            why = [f"transport {self.name}: moved the peer's nonce", self._facts(endpoint)]
            why += [f"refused before: {'; '.join(reasons)}"] if reasons else []
            logger.info("%s", "; ".join(part for part in why if part))
            return peer
        raise PullFailed(f"no transport reaches the peer: {'; '.join([*reasons, *self._absent])}")

    def close(self) -> None:
        for candidate in self._candidates:
            candidate.close()


def choose(config: TransferConfig, cache: Blocks, notify: Callable[[], None]) -> Transport:
    """The transport of one decode engine on the CPU, pulling into `cache`; `notify` is called from any thread when a
    pull is terminal.

    Raises ConfigError where the configured one cannot work here.
    """
    num_blocks, block_bytes = cache.shape
    makers: dict[str, Callable[[], Transport]] = {
        "shared_memory": lambda: SharedMemoryTransport(cache, notify),
        "nixl": lambda: NixlTransport(Memory(cache.ctypes.data, num_blocks, block_bytes), notify),
    }
    return _chosen(config, HOST_MEMORY, makers, lambda endpoint: "")


def choose_device(
    config: TransferConfig,
    device: Device,
    cache: DeviceBlocks,
    notify: Callable[[], None],
    gather: Gather | None = None,
) -> Transport:
    """The same for an engine on a GPU. `gather`: the kernel that moves small pieces."""
    makers: dict[str, Callable[[], Transport]] = {
        "cuda_ipc": lambda: CudaIpcTransport(device, cache, notify, gather),
        "host_staged": lambda: HostStagedTransport(device, cache, notify),
        "nixl": lambda: NixlTransport(
            Memory(cache.pointer, cache.num_blocks, cache.block_bytes, "VRAM", device.ordinal), notify
        ),
    }

    def facts(endpoint: Endpoint) -> str:
        return next((topology.between(device, offer["bus_id"]) for offer in offers(endpoint) if "bus_id" in offer), "")

    return _chosen(config, GPU_MEMORY, makers, facts)


def possible(
    config: TransferConfig, names: tuple[str, ...], makers: dict[str, Callable[[], T]]
) -> tuple[dict[str, T], list[str]]:
    """What can be made for a cache that `names` can read: by name, and the reasons of what cannot. Raises
    ConfigError.
    """
    wanted = names if config.transport == "auto" else (config.transport,)
    if not set(wanted) <= set(names):
        kind = "host" if names == HOST_MEMORY else "GPU"
        raise ConfigError(
            f"transfer.transport: {config.transport} moves nothing out of {kind} memory; auto, {', '.join(names)} do"
        )
    made: dict[str, T] = {}
    reasons = []
    for name in wanted:
        try:
            made[name] = makers[name]()
        except PullFailed as error:
            reasons.append(f"{name}: {error}")
    if not made:
        raise ConfigError(f"transfer.transport: {config.transport} cannot work here: {'; '.join(reasons)}")
    if reasons:
        logger.info("transports that cannot work here: %s", "; ".join(reasons))
    return made, reasons


def _chosen(
    config: TransferConfig,
    names: tuple[str, ...],
    makers: dict[str, Callable[[], Transport]],
    facts: Callable[[Endpoint], str],
) -> Transport:
    made, reasons = possible(config, names, makers)
    return AutoTransport(list(made.values()), reasons, facts) if config.transport == "auto" else made[config.transport]
