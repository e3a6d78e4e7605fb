"""The prefill side: a cache, its lease words, and an endpoint that offers whatever can read them here."""

from collections.abc import Callable
from contextlib import ExitStack

from kv_transfer.config import TransferConfig
from kv_transfer.device.device import Device, KVCache
from kv_transfer.device.device_pool import DevicePool
from kv_transfer.endpoint import several
from kv_transfer.lease import Words
from kv_transfer.segment import SharedSegment
from kv_transfer.select import possible
from kv_transfer.transport import ExportedCache
from protocol.errors import ConfigError, PullFailed


class Export:
    """A zeroed cache and its lease words, made readable. Close it when the runner and all tensors of the cache are
    gone; whoever has mapped its shared-memory file keeps that.
    """

    def __init__(
        self,
        config: TransferConfig,
        name: str,
        device: Device | None = None,
        *,
        num_blocks: int,
        block_bytes: int,
        num_words: int,
        num_peers: int,
    ) -> None:
        """`name` is the shared-memory file's. `device` is the GPU whose memory the cache is to take; None means host
        memory. Raises CapacityError, or ConfigError where the configured transport cannot work here.
        """
        with ExitStack() as resources:
            segment = SharedSegment.create(
                name, block_bytes=block_bytes, num_blocks=0 if device else num_blocks, num_words=num_words
            )
            resources.callback(segment.close)
            if device is None:
                cache = KVCache.in_host_memory(segment.cache)
            else:
                try:
                    pool = DevicePool(device, segment.nonce, num_blocks=num_blocks, block_bytes=block_bytes)
                except PullFailed as error:
                    raise ConfigError(f"GPU {device.bus_id}: {error}") from error
                resources.callback(pool.close)
                cache = pool.cache
            exported = ExportedCache(cache=cache, segment=segment, num_peers=num_peers)
            made, _ = possible(config, cache.memory, lambda transport: transport.export(exported, resources))
            self.endpoint = several(list(made.values()))
            self.cache = cache
            self.words: Words = segment.words
            self.close: Callable[[], None] = resources.pop_all().close
