"""Builds one engine from the configuration: cache, runner, scheduler, service and loop. It needs no Ray: an actor, a
plain process or a test calls it.

    build_prefill(config, address, send, prefix, resources)  -> EngineLoop, not yet started
    build_decode(config, address, send, prefix, resources)   -> EngineLoop, not yet started

`resources` receives what must be given back once the loop has stopped: shared memory, mappings and threads.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.config import ClusterConfig, PoolConfig
from cluster.served_model import ServedModel, is_profiled, num_blocks, num_host_blocks, serve_model
from decode_pool.service import DecodeService
from engine.loop import EngineLoop, Service
from engine.runner import Runner
from engine.runners import arithmetic_model
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.proposer import NGramProposer
from engine.scheduler.scheduler import Proposer, Scheduler
from kv_transfer.checksum import Checksum, checksum_of
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import PREFIX, remove_stale
from kv_transfer.transport import Transport
from prefill_pool.service import PrefillService
from protocol.messages import Address, Envelope, Hello
from protocol.router_link import LinkConfig

Send = Callable[[Envelope], None]
MakeRunner = Callable[[Any, int], Runner]
"""Makes a runner from (cache, host blocks). The runner uses the cache in place: uint8 [num_blocks, block_bytes], a
numpy array on the host and a torch tensor on a GPU.
"""


def build_prefill(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """Builds a prefill engine. Its lease words, and on a CPU its cache too, lie in the shared-memory file that is named
    `prefix` + the engine's name. Raises StartupError.
    """
    # This import loads numba, which the supervisor does not need. It imports this module too, but moves no bytes.
    from kv_transfer.exports import DeviceExport, HostExport

    served, pool = serve_model(config), config.prefill
    layout, on_host = served.layout(pool), config.device_of(pool) == "cpu"
    blocks, make_runner = _prepare(config, pool, served)
    remove_stale()  # the engine's machine may be another one than the supervisor's
    name = f"{prefix.removeprefix(PREFIX)}{address.replica_id}-{address.epoch}"
    # There are as many lease words as blocks, because every leased prompt holds at least one block of its own.
    shape: dict[str, Any] = {"num_blocks": blocks, "block_bytes": layout.block_bytes, "num_slots": blocks}
    export: HostExport | DeviceExport
    if on_host:
        export = HostExport(config.transfer, name, **shape)
    else:
        from kv_transfer.device.cuda_driver import CudaDevice

        export = DeviceExport(config.transfer, name, CudaDevice(), **shape, num_peers=config.decode.replicas)
    resources.callback(export.close)
    service = PrefillService(
        address=address,
        scheduler=_scheduler(pool, blocks, served, layout),
        leases=LeaseTable(export.words, address.epoch),
        config=config.transfer,
        link=_link(config),
        hello=_hello("prefill", pool, blocks, layout, export.endpoint),
        clock=time.monotonic,
        checksum=_checksum(config, export.cache),
    )
    return _loop(service, make_runner(export.cache, 0), pool, address, send)


def build_decode(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """Builds a decode engine. No other process sees its cache. Raises StartupError."""
    served, pool = serve_model(config), config.decode
    layout = served.layout(pool)
    blocks, make_runner = _prepare(config, pool, served)
    cache = make_cache(config, pool, blocks, layout)
    loops: list[EngineLoop] = []
    transport = _transport(config, pool, cache, lambda: loops[0].wake())
    resources.callback(transport.close)
    service = DecodeService(
        address=address,
        scheduler=_scheduler(pool, blocks, served, layout, NGramProposer()),
        transport=transport,
        config=config.transfer,
        link=_link(config),
        hello=_hello("decode", pool, blocks, layout, b""),
        block_bytes=layout.block_bytes,
        clock=time.monotonic,
        checksum=_checksum(config, cache),
    )
    loops.append(_loop(service, make_runner(cache, num_host_blocks(pool, served)), pool, address, send))
    return loops[0]


def make_cache(config: ClusterConfig, pool: PoolConfig, blocks: int, layout: KVLayout) -> Any:
    """A zeroed cache that no other process needs to find by name: uint8 [blocks, block_bytes], a numpy array on the
    host, a torch tensor on a GPU.
    """
    if config.device_of(pool) == "cpu":
        cache = np.empty((blocks, layout.block_bytes), np.uint8)
        cache.fill(0)  # touches every page now, so that no pull has to wait for that
        return cache
    import torch

    return torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8, device="cuda")


def _transport(config: ClusterConfig, pool: PoolConfig, cache: Any, wake: Callable[[], None]) -> Transport:
    """A transport that pulls into `cache`, which `make_cache` made. Raises ConfigError."""
    from kv_transfer.select import choose, choose_device  # loads numba, as above

    if config.device_of(pool) == "cpu":
        return choose(config.transfer, cache, wake)
    from engine.kernels.block_copy import pull_blocks
    from kv_transfer.device.cuda_driver import CudaDevice
    from kv_transfer.device.device import DeviceBlocks

    return choose_device(config.transfer, CudaDevice(), DeviceBlocks.of(cache), wake, pull_blocks)


def _checksum(config: ClusterConfig, cache: Any) -> Checksum | None:
    return checksum_of(cache) if config.transfer.checksum else None


def _loop(service: Service, runner: Runner, pool: PoolConfig, address: Address, send: Send) -> EngineLoop:
    return EngineLoop(
        service,
        runner,
        address=address,
        clock=time.monotonic,
        send=send,
        asynchronous=pool.engine.async_scheduling,
        stall_timeout_s=pool.engine.stall_timeout_s,
    )


def _scheduler(
    pool: PoolConfig, blocks: int, served: ServedModel, layout: KVLayout, proposer: Proposer | None = None
) -> Scheduler:
    return Scheduler(
        pool.engine,
        num_blocks=blocks,
        num_host_blocks=num_host_blocks(pool, served),
        fingerprint=layout.fingerprint(),
        eos_token_ids=served.eos_token_ids,
        proposer=proposer,
        clock=time.monotonic,
    )


def _link(config: ClusterConfig) -> LinkConfig:
    return LinkConfig(
        status_interval_s=config.router.status_interval_s, router_timeout_s=config.router.router_timeout_s
    )


def _hello(role: Any, pool: PoolConfig, blocks: int, layout: KVLayout, endpoint: bytes) -> Hello:
    return Hello(
        role=role,
        layout_fingerprint=layout.fingerprint(),
        block_size=pool.engine.block_size,
        num_blocks=blocks,
        max_num_seqs=pool.engine.max_num_seqs,
        max_model_len=pool.engine.max_model_len,
        max_prompt_tokens=pool.engine.max_prompt_tokens(blocks),
        endpoint=endpoint,
    )


def _prepare(config: ClusterConfig, pool: PoolConfig, served: ServedModel) -> tuple[int, MakeRunner]:
    """The number of KV blocks that an engine gets, and a function that makes its runner around them.

    A model on a GPU is loaded here, because the memory that it leaves may decide the number of blocks.
    """
    if config.device_of(pool) == "cpu":
        return num_blocks(config, pool, served), partial(_cpu_runner, config, pool)
    from engine.kernels.launch import require_device

    require_device()
    from engine.models.llama import load_model
    from engine.runners.cuda import CUDARunner
    from engine.runners.cuda_memory import profiled_blocks

    assert config.model is not None, "the arithmetic runner takes no GPU"
    engine = pool.engine
    model = load_model(Path(config.model), config.dtype, "cuda")
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
    """Loads the model. The runner uses `cache`, uint8 [num_blocks, block_bytes], in place."""
    if config.model is None or config.runner == "arithmetic":
        return ArithmeticRunner(arithmetic_model.cache_view(cache), num_host_blocks=host_blocks)
    import torch  # takes 1.5 s and 200 MB, which an arithmetic engine does not need

    from engine.models.llama import load_model
    from engine.runners.torch_cpu import TorchCPURunner

    torch.set_num_threads(pool.num_threads)
    model = load_model(Path(config.model), config.dtype)
    return TorchCPURunner(
        model,
        torch.from_numpy(cache.reshape(-1)),
        block_size=pool.engine.block_size,
        num_threads=pool.num_threads,
        num_host_blocks=host_blocks,
    )
