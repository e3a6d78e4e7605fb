"""One engine from the configuration: cache, runner, scheduler, service, loop. No Ray here: an actor, a plain process or
a test calls it.

    served = serve_model(config)                            what the model looks like; loads nothing
    build_prefill(config, address, send, prefix, resources)  -> EngineLoop, not yet started
    build_decode(config, address, send, prefix, resources)   -> EngineLoop, not yet started

`resources` holds what is to be given back when the loop has stopped: shared memory, mappings, threads.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster import limits
from cluster.config import ClusterConfig, PoolConfig
from decode_pool.service import DecodeService
from engine.loop import EngineLoop
from engine.models.checkpoint import check_model_dir
from engine.models.config import kv_layout_fields
from engine.models.config_file import eos_token_ids
from engine.parts import EngineParts, assemble
from engine.runner import Runner
from engine.runners import arithmetic_model
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.proposer import NGramProposer
from kv_transfer.device.device import Device, KVCache
from kv_transfer.exports import Export
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import PREFIX, remove_stale
from kv_transfer.select import choose
from prefill_pool.service import PrefillService
from protocol.errors import ConfigError
from protocol.messages import Address, Envelope, PoolName
from protocol.router_link import LinkConfig

Send = Callable[[Envelope], None]
MakeRunner = Callable[[Any, int], Runner]
"""(cache, host blocks): the cache uint8 [num_blocks, block_bytes], numpy's on the host, torch's on a GPU; used in
place.
"""

DEFAULT_KV_CACHE_BYTES = {"torch": 1024**3, "arithmetic": 4 * 1024**2}
"""Per engine, by runner, where a pool names neither `num_blocks` nor `kv_cache_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the deployment needs to know of its model before any weight is read."""

    layout_fields: dict[str, Any]
    """Of `KVLayout`, but for the block size."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int

    def layout(self, pool: PoolConfig) -> KVLayout:
        return KVLayout(**self.layout_fields, block_size=pool.engine.block_size)


def serve_model(config: ClusterConfig) -> ServedModel:
    """Reads configuration and headers of the model. Raises ModelError, or ConfigError for knobs that it cannot
    satisfy.
    """
    if config.model is None or config.runner == "arithmetic":
        fields: dict[str, Any] = arithmetic_model.kv_layout_fields(1)
        served = ServedModel(
            layout_fields=fields, eos_token_ids=(), max_model_len=2**20, vocab_size=arithmetic_model.VOCAB_SIZE
        )
    else:
        path = Path(config.model)
        model = check_model_dir(path, longest_sequence(config))
        served = ServedModel(
            layout_fields={**kv_layout_fields(model, config.dtype, 1)},
            eos_token_ids=eos_token_ids(path),
            max_model_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
        )
    del served.layout_fields["block_size"]
    check_max_model_len(config, served.max_model_len)
    for name, pool in config.pools.items():
        if pool.replicas and not is_profiled(pool) and num_blocks(config, pool, served) < 2:
            raise ConfigError(
                f"{name}.kv_cache_bytes: too few for two blocks of {served.layout(pool).block_bytes} bytes"
            )
    return served


def longest_sequence(config: ClusterConfig) -> int:
    """`max_model_len` of the deployment: both pools must rotate alike, so the larger one of theirs."""
    return max(pool.engine.max_model_len for pool in config.pools.values() if pool.replicas)


def check_max_model_len(config: ClusterConfig, limit: int) -> None:
    """`limit`: the model's. Raises ConfigError."""
    for name, pool in config.pools.items():
        if pool.replicas and pool.engine.max_model_len > limit:
            raise ConfigError(f"{name}.max_model_len: {pool.engine.max_model_len} is more than the model's {limit}")


def is_profiled(pool: PoolConfig) -> bool:
    """Whether its engines find out on their GPU how many KV blocks there is room for."""
    return bool(pool.num_gpus) and not pool.engine.num_blocks and not pool.engine.kv_cache_bytes


def num_blocks(config: ClusterConfig, pool: PoolConfig, served: ServedModel) -> int:
    """KV blocks of one engine of the pool, block 0 included. Of one that is not profiled."""
    return (
        pool.engine.num_blocks
        or (pool.engine.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES[config.runner]) // served.layout(pool).block_bytes
    )


def limit_warnings(config: ClusterConfig, served: ServedModel) -> list[str]:
    """As `cluster.limits` tells them. How many blocks a profiled engine will have nobody knows yet: they count as
    enough.
    """
    prefill, decode = (
        2**31 if is_profiled(pool) else num_blocks(config, pool, served) for pool in (config.prefill, config.decode)
    )
    return limits.limit_warnings(config, prefill_blocks=prefill, decode_blocks=decode)


def num_host_blocks(pool: PoolConfig, served: ServedModel) -> int:
    """KV blocks of host memory that one engine of the pool may swap into."""
    return pool.engine.num_host_blocks or pool.engine.swap_space_bytes // served.layout(pool).block_bytes


def build_prefill(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """A prefill engine. Lease words, and on the CPU the cache, lie in the shared-memory file `prefix` + its name.
    Raises StartupError.
    """
    served, pool = serve_model(config), config.prefill
    blocks, make_runner = _prepare(config, pool, served)
    remove_stale()  # of this machine, which need not be the supervisor's
    name = f"{prefix.removeprefix(PREFIX)}{address.replica_id}-{address.epoch}"
    # As many lease words as blocks: every leased prompt has a block of its own at least.
    export = Export(
        config.transfer,
        name,
        _device(config, pool),
        num_blocks=blocks,
        block_bytes=served.layout(pool).block_bytes,
        num_words=blocks,
        num_peers=config.decode.replicas,
    )
    resources.callback(export.close)
    engine = _assemble(config, "prefill", served, blocks, address, export.endpoint)
    leases = LeaseTable(export.words, address.epoch)
    service = PrefillService(engine, leases=leases, config=config.transfer, cache=export.cache)
    return engine.loop(service, make_runner(export.cache.tensor, 0), send)


def build_decode(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """A decode engine; its cache is its own. Raises StartupError."""
    served, pool = serve_model(config), config.decode
    blocks, make_runner = _prepare(config, pool, served)
    cache = make_cache(config, pool, blocks, served.layout(pool))
    loops: list[EngineLoop] = []
    transport = choose(config.transfer, cache, lambda: loops[0].wake())
    resources.callback(transport.close)
    engine = _assemble(config, "decode", served, blocks, address)
    service = DecodeService(engine, transport=transport, config=config.transfer, cache=cache)
    loops.append(engine.loop(service, make_runner(cache.tensor, num_host_blocks(pool, served)), send))
    return loops[0]


def _assemble(
    config: ClusterConfig, role: PoolName, served: ServedModel, blocks: int, address: Address, endpoint: bytes = b""
) -> EngineParts:
    pool = config.pools[role]
    return assemble(
        pool.engine,
        role=role,
        address=address,
        num_blocks=blocks,
        num_host_blocks=num_host_blocks(pool, served),
        fingerprint=served.layout(pool).fingerprint(),
        link=LinkConfig(
            status_interval_s=config.router.status_interval_s, router_timeout_s=config.router.router_timeout_s
        ),
        clock=time.monotonic,
        endpoint=endpoint,
        eos_token_ids=served.eos_token_ids,
        proposer=NGramProposer() if role == "decode" else None,
    )


def make_cache(config: ClusterConfig, pool: PoolConfig, blocks: int, layout: KVLayout) -> KVCache:
    """A zeroed cache that no other process needs to see by name."""
    device = _device(config, pool)
    if device is None:
        cache = np.empty((blocks, layout.block_bytes), np.uint8)
        cache.fill(0)  # touches every page now, so that no pull pays for it
        return KVCache.in_host_memory(cache)
    import torch

    from engine.kernels.block_copy import pull_blocks

    tensor = torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8, device="cuda")
    return KVCache.on_gpu(device, tensor, pull_blocks)


def _device(config: ClusterConfig, pool: PoolConfig) -> Device | None:
    """The GPU that an engine of the pool takes; None: it computes on the CPU."""
    if config.device_of(pool) == "cpu":
        return None
    from kv_transfer.device.cuda_driver import CudaDevice

    return CudaDevice()


def _prepare(config: ClusterConfig, pool: PoolConfig, served: ServedModel) -> tuple[int, MakeRunner]:
    """How many KV blocks an engine gets, and what makes its runner around them.

    A model on a GPU is loaded here: what it leaves may decide how many.
    """
    if config.device_of(pool) == "cpu":
        return num_blocks(config, pool, served), partial(_cpu_runner, config, pool)
    from engine.kernels.launch import require_device

    require_device()
    from engine.models.loading import load_model
    from engine.runners.cuda import CUDARunner
    from engine.runners.cuda_memory import await_device_memory, profiled_blocks

    assert config.model is not None, "the arithmetic runner takes no GPU"
    engine = pool.engine
    await_device_memory(engine.gpu_memory_utilization)
    model = load_model(Path(config.model), config.dtype, "cuda", longest_sequence(config))
    blocks = profiled_blocks(model, engine) if is_profiled(pool) else num_blocks(config, pool, served)

    def make(cache: Any, host_blocks: int) -> Runner:
        return CUDARunner(
            model,
            cache.view(-1),
            block_size=engine.block_size,
            max_model_len=engine.max_model_len,
            graph_sizes=engine.cuda_graph_sizes,
            num_host_blocks=host_blocks,
        )

    return blocks, make


def _cpu_runner(config: ClusterConfig, pool: PoolConfig, cache: npt.NDArray[np.uint8], host_blocks: int) -> Runner:
    """Loads the model. `cache`: uint8 [num_blocks, block_bytes], used in place."""
    if config.model is None or config.runner == "arithmetic":
        return ArithmeticRunner(arithmetic_model.cache_view(cache), num_host_blocks=host_blocks)
    import torch  # 1.5 s and 200 MB that an arithmetic engine does not need

    from engine.models.loading import load_model
    from engine.runners.torch_cpu import TorchCPURunner

    torch.set_num_threads(pool.num_threads)
    model = load_model(Path(config.model), config.dtype, "cpu", longest_sequence(config))
    return TorchCPURunner(
        model,
        torch.from_numpy(cache.reshape(-1)),
        block_size=pool.engine.block_size,
        num_threads=pool.num_threads,
        num_host_blocks=host_blocks,
    )
