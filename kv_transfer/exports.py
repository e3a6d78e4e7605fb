"""The prefill side of every transport: a cache, its lease words, and an endpoint that offers whatever can read them
here.
"""

from collections.abc import Callable
from contextlib import ExitStack

from kv_transfer.config import TransferConfig
from kv_transfer.device.device import Device, Tensor
from kv_transfer.device.device_pool import DevicePool
from kv_transfer.endpoint import several
from kv_transfer.lease import Words
from kv_transfer.segment import SharedSegment
from kv_transfer.select import GPU_MEMORY, HOST_MEMORY, possible
from kv_transfer.transport import Blocks, Endpoint
from kv_transfer.transports import cuda_ipc, host_staged, nixl, shared_memory
from kv_transfer.transports.host_staged import BUFFER_BYTES, NUM_BUFFERS, StagedExport
from kv_transfer.transports.nixl import Memory, NixlExport
from kv_transfer.transports.staging.channel import channel_bytes
from protocol.errors import ConfigError, PullFailed


class HostExport:
    """A cache in host memory, zeroed. `close` takes the file away; who has mapped it keeps it."""

    def __init__(self, config: TransferConfig, name: str, *, num_blocks: int, block_bytes: int, num_slots: int) -> None:
        """`name`: of the shared-memory file. Raises CapacityError, or ConfigError where the configured transport cannot
        work here.
        """
        with ExitStack() as resources:
            segment = SharedSegment.create(name, block_bytes=block_bytes, num_blocks=num_blocks, num_slots=num_slots)
            resources.callback(segment.close)

            def offer_nixl() -> Endpoint:
                export = NixlExport(
                    Memory(segment.cache.ctypes.data, num_blocks, block_bytes), segment.words, segment.nonce
                )
                resources.callback(export.close)
                return export.endpoint

            makers = {shared_memory.KIND: lambda: shared_memory.export(segment), nixl.KIND: offer_nixl}
            self.endpoint = several(list(possible(config, HOST_MEMORY, makers)[0].values()))
            self.cache: Blocks = segment.cache
            self.words: Words = segment.words
            self.close: Callable[[], None] = resources.pop_all().close


class DeviceExport:
    """A cache in GPU memory, zeroed; its lease words in host memory. Close it when runner and tensors are gone."""

    def __init__(
        self,
        config: TransferConfig,
        name: str,
        device: Device,
        *,
        num_blocks: int,
        block_bytes: int,
        num_slots: int,
        num_peers: int,
    ) -> None:
        """`name`: of the shared-memory file. Raises CapacityError, or ConfigError where the configured transport cannot
        work here.
        """
        # Twice as many channels as peers: a restarted router makes each connect anew before it lets go of the old one.
        staged = config.transport in ("auto", host_staged.KIND)
        with ExitStack() as resources:
            segment = SharedSegment.create(
                name,
                block_bytes=channel_bytes(BUFFER_BYTES, NUM_BUFFERS),
                num_blocks=2 * num_peers if staged else 0,
                num_slots=num_slots,
            )
            resources.callback(segment.close)
            try:
                pool = DevicePool(device, segment.nonce, num_blocks=num_blocks, block_bytes=block_bytes)
            except PullFailed as error:
                raise ConfigError(f"GPU {device.bus_id}: {error}") from error
            resources.callback(pool.close)

            def offer_staged() -> Endpoint:
                export = StagedExport(device, pool, segment, BUFFER_BYTES, NUM_BUFFERS)
                resources.callback(export.close)
                return export.endpoint

            def offer_nixl() -> Endpoint:
                memory = Memory(pool.pointer, num_blocks, block_bytes, "VRAM", device.ordinal)
                export = NixlExport(memory, segment.words, segment.nonce, pool.pointer + pool.nonce_offset)
                resources.callback(export.close)
                return export.endpoint

            makers = {
                cuda_ipc.KIND: lambda: cuda_ipc.export(device, pool, segment),
                host_staged.KIND: offer_staged,
                nixl.KIND: offer_nixl,
            }
            self.endpoint = several(list(possible(config, GPU_MEMORY, makers)[0].values()))
            self.cache: Tensor = pool.blocks.tensor
            self.words: Words = segment.words
            self.close: Callable[[], None] = resources.pop_all().close
