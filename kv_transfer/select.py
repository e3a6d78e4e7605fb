"""Chooses the transport. `auto` believes no claim: a candidate is taken when it has opened the peer's memory and found its nonce there."""

import logging
from collections.abc import Callable

from kv_transfer.config import TransferConfig
from kv_transfer.shared_memory import SharedMemoryTransport
from kv_transfer.transport import Blocks, Endpoint, Peer, Transport
from protocol.errors import PullFailed

logger = logging.getLogger(__name__)


class AutoTransport:
    """Tries `candidates`, best first, with each peer. `name`: the one chosen last, "auto" before."""

    def __init__(self, candidates: list[Transport]) -> None:
        self.name = "auto"
        self._candidates = candidates

    def connect(self, endpoint: Endpoint) -> Peer:
        """Raises PullFailed with every candidate's reason when none works, LayoutMismatch at once: no other transport can mend that."""
        reasons = []
        for candidate in self._candidates:
            try:
                peer = candidate.connect(endpoint)
            except PullFailed as error:
                reasons.append(f"{candidate.name}: {error}")
                continue
            self.name = candidate.name
            logger.info("transport %s: found the peer's nonce%s", self.name, f"; refused before: {'; '.join(reasons)}" if reasons else "")
            return peer
        raise PullFailed(f"no transport reaches the peer: {'; '.join(reasons)}")

    def close(self) -> None:
        for candidate in self._candidates:
            candidate.close()


def choose(config: TransferConfig, cache: Blocks, notify: Callable[[], None]) -> Transport:
    """The transport of one decode engine, pulling into `cache`; `notify` is called from any thread when a pull is terminal."""
    shared_memory = SharedMemoryTransport(cache, notify)
    return shared_memory if config.transport == "shared_memory" else AutoTransport([shared_memory])
