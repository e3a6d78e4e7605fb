"""The knobs of KV transfer, the same in both pools."""

from dataclasses import dataclass

from kv_transfer.transports import registry
from protocol.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How blocks travel, and how long each side of a handoff waits for the other."""

    transport: str = AUTO
    """A name of kv_transfer/transports/registry.py. `auto` takes the best transport that moves a nonce from peer to
    peer.
    """
    checksum: bool = False
    """The bytes of pulled blocks are compared, too: each side reads them once more. A mismatch fails the attempt."""
    pull_timeout_s: float = 30.0
    """A pull that takes longer is asked to fail. A pull waits no longer for the peer's cache to open."""
    lease_s: float = 30.0
    """A finished prompt waits this long for its decode engine, renewals aside. A handoff without a request is forgotten
    after as long.
    """
    revoke_s: float = 5.0
    """A revoked lease waits this long for the decode engine's answer before its blocks are taken back."""
    max_early_handoffs: int = 1024
    """A decode engine keeps so many handoffs that came before their request."""

    def __post_init__(self) -> None:
        if self.transport not in (AUTO, *registry.names()):
            raise ConfigError(f"transport: {self.transport!r} is not one of {AUTO}, {', '.join(registry.names())}")
        for name in ("pull_timeout_s", "lease_s", "revoke_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        if self.max_early_handoffs < 1:
            raise ConfigError(f"max_early_handoffs: {self.max_early_handoffs} is below 1")
