"""All transports between processes, best first: where several work, an engine takes the first."""

from kv_transfer.device.device import MemoryKind
from kv_transfer.transport import TwoSided
from kv_transfer.transports import cuda_ipc, host_staged, nixl, shared_memory

TRANSPORTS: tuple[TwoSided, ...] = (shared_memory, cuda_ipc, host_staged, nixl)


def names(memory: MemoryKind | None = None) -> tuple[str, ...]:
    """Returns the names of the transports between caches in one kind of memory, or in any."""
    return tuple(transport.KIND for transport in TRANSPORTS if memory is None or memory in transport.MEMORY)
