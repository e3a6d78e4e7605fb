"""Chooses the transport. `auto` believes no claim: a candidate is taken when it has moved the peer's nonce from there
to here.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kv_transfer.config import AUTO, TransferConfig
from kv_transfer.device import topology
from kv_transfer.device.device import KVCache, MemoryKind
from kv_transfer.endpoint import offers
from kv_transfer.transport import Endpoint, Notify, Peer, Transport, TwoSided
from kv_transfer.transports.registry import TRANSPORTS, names
from protocol.errors import CapacityError, ConfigError, PullFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AutoTransport:
    """Tries `candidates`, best first, with each peer. `name` is that of the one chosen last, and "auto" before."""

    def __init__(
        self,
        candidates: Sequence[Transport],
        absent: Sequence[str] = (),
        facts: Callable[[Endpoint], str] = lambda endpoint: "",
    ) -> None:
        """`absent` are transports that cannot work here, each with its reason. `facts` says what lies between a peer
        and us, for the log.
        """
        self.name = AUTO
        self._candidates, self._absent, self._facts = candidates, absent, facts

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> Peer:
        """Raises PullFailed with every candidate's reason when none works, LayoutMismatch at once: no other transport
        can mend that.
        """
        reasons = []
        for candidate in self._candidates:
            try:
                peer = candidate.connect(endpoint, src_block_bytes)
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


def choose(config: TransferConfig, cache: KVCache, notify: Notify) -> Transport:
    """Returns the transport of one decode engine, which pulls into `cache`. Raises ConfigError where the configured one
    cannot work here.
    """
    made, reasons = possible(config, cache.memory, lambda transport: transport.import_into(cache, notify))
    if config.transport != AUTO:
        return made[config.transport]

    def facts(endpoint: Endpoint) -> str:
        if cache.device is None:
            return ""
        bus_ids = (offer["bus_id"] for offer in offers(endpoint) if "bus_id" in offer)
        return next((topology.between(cache.device, bus_id) for bus_id in bus_ids), "")

    return AutoTransport(list(made.values()), reasons, facts)


def possible(
    config: TransferConfig, memory: MemoryKind, make: Callable[[TwoSided], T]
) -> tuple[dict[str, T], list[str]]:
    """Returns what `make` gives for each configured transport between caches in such memory, by name and best first,
    and the reasons of those that cannot work here. Raises ConfigError where none can.
    """
    able = names(memory)
    if config.transport not in (AUTO, *able):
        raise ConfigError(
            f"transfer.transport: {config.transport} moves nothing out of {memory} memory; auto, {', '.join(able)} do"
        )
    made: dict[str, T] = {}
    reasons = []
    for transport in TRANSPORTS:
        if transport.KIND not in (able if config.transport == AUTO else (config.transport,)):
            continue
        try:
            made[transport.KIND] = make(transport)
        except PullFailed as error:
            reasons.append(f"{transport.KIND}: {error}")
        except CapacityError as error:
            reasons.append(f"{transport.KIND}: {error}")
            logger.warning("transport %s lacks room: %s", transport.KIND, error)
    if not made:
        raise ConfigError(f"transfer.transport: {config.transport} cannot work here: {'; '.join(reasons)}")
    if reasons:
        logger.info("transports that cannot work here: %s", "; ".join(reasons))
    return made, reasons
