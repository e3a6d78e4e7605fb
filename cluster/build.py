"""Builds one engine from the configuration: cache, runner, scheduler, service and loop. It needs no Ray: an actor, a
plain process or a test calls it.

    build_prefill(config, address, send, prefix, resources)  -> EngineLoop, not yet started
    build_decode(config, address, send, prefix, resources)   -> EngineLoop, not yet started

`resources` receives what must be given back once the loop has stopped: shared memory, pinned memory, mappings and
threads.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.config import ClusterConfig, PoolConfig
from cluster.served_model import ServedModel, is_profiled, longest_sequence, num_blocks, num_host_blocks, serve_model
from decode_pool.service import DecodeService
from engine.guidance import Guidance
from engine.loop import EngineLoop
from engine.parts import EngineParts, assemble
from engine.runner import Runner
from engine.runners import arithmetic_model
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.proposer import NGramProposer
from jit import own_cores
from kv_transfer.connecting import ThreadConnector
from kv_transfer.device.device import Device, KVCache
from kv_transfer.exports import Export
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import PREFIX, remove_stale
from kv_transfer.select import choose
from prefill_pool.service import PrefillService
from protocol.messages import Address, Envelope, PoolName
from protocol.router_link import LinkConfig
from protocol.start_times import phase

log = logging.getLogger(__name__)

Send = Callable[[Envelope], None]
MakeRunner = Callable[[Any, int, Guidance | None], Runner]
"""Makes a runner from (cache, host blocks, what serves grammars, if anything does). The runner uses the cache in place:
uint8 [num_blocks, block_bytes], a numpy array on the host and a torch tensor on a GPU.
"""


def build_prefill(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """Builds a prefill engine. Its lease words, and on a CPU its cache too, lie in the shared-memory file that is named
    `prefix` + the engine's name. Raises StartupError.
    """
    served, pool = serve_model(config), config.prefill
    blocks, make_runner = _prepare(config, pool, served, resources)
    remove_stale()  # the engine's machine may be another one than the supervisor's
    name = f"{prefix.removeprefix(PREFIX)}{address.replica_id}-{address.epoch}"
    # There are as many lease words as blocks, because every leased prompt holds at least one block of its own.
    with phase("KV cache"):
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
    loops: list[EngineLoop] = []

    def wake() -> None:
        loops[0].wake()

    guidance = _guidance(config, served, wake, resources)
    engine = _assemble(config, "prefill", served, blocks, address, guidance, export.endpoint)
    leases = LeaseTable(export.words, address.epoch)
    service = PrefillService(engine, leases=leases, config=config.transfer, cache=export.cache)
    loops.append(engine.loop(service, make_runner(export.cache.tensor, 0, guidance), send))
    return loops[0]


def build_decode(config: ClusterConfig, address: Address, send: Send, prefix: str, resources: ExitStack) -> EngineLoop:
    """Builds a decode engine. No other process sees its cache. Raises StartupError."""
    served, pool = serve_model(config), config.decode
    blocks, make_runner = _prepare(config, pool, served, resources)
    with phase("KV cache"):
        cache = make_cache(config, pool, blocks, served.layout(pool))
    loops: list[EngineLoop] = []

    def wake() -> None:
        loops[0].wake()

    with phase("transports"):
        connector = ThreadConnector(choose(config.transfer, cache, wake), wake)
    resources.callback(connector.close)
    guidance = _guidance(config, served, wake, resources)
    engine = _assemble(config, "decode", served, blocks, address, guidance)
    service = DecodeService(engine, transport=connector, config=config.transfer, cache=cache)
    runner = make_runner(cache.tensor, num_host_blocks(pool, served), guidance)
    loops.append(engine.loop(service, runner, send))
    return loops[0]


def on_cores(cpus: frozenset[int] | None, make: Callable[[ExitStack], EngineLoop], resources: ExitStack) -> EngineLoop:
    """Makes an engine whose threads stay on these logical CPUs, or anywhere if None: threads inherit them from the one
    that starts them.
    """
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
            own_cores.prepare()
        except OSError as error:  # the machine has changed since the deployment looked: it runs on any
            log.warning("the engine is not kept on its cores", extra={"cpus": sorted(cpus), "error": str(error)})
    return make(resources)


def _guidance(
    config: ClusterConfig, served: ServedModel, wake: Callable[[], None], resources: ExitStack
) -> Guidance | None:
    """None where the model has no text, or no token that ends an answer."""
    if config.model is None or not served.eos_token_ids or not (Path(config.model) / "tokenizer.json").exists():
        return None
    guidance = Guidance(Path(config.model), served.vocab_size, served.eos_token_ids, wake)
    resources.callback(guidance.close)
    return guidance


def _assemble(
    config: ClusterConfig,
    role: PoolName,
    served: ServedModel,
    blocks: int,
    address: Address,
    guidance: Guidance | None,
    endpoint: bytes = b"",
) -> EngineParts:
    pool = config.pools[role]
    with phase("scheduler"):
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
            grammars=guidance,
        )


def make_cache(config: ClusterConfig, pool: PoolConfig, blocks: int, layout: KVLayout) -> KVCache:
    """A zeroed cache, uint8 [blocks, block_bytes], that no other process needs to find by name."""
    device = _device(config, pool)
    if device is None:
        cache = np.empty((blocks, layout.block_bytes), np.uint8)
        cache.fill(0)  # touches every page now, so that no pull has to wait for that
        return KVCache.in_host_memory(cache)
    import torch

    from engine.kernels.block_copy import pull_blocks, warm_up_pulls

    tensor = torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8, device="cuda")
    warm_up_pulls(tensor)
    return KVCache.on_gpu(device, tensor, pull_blocks)


def _device(config: ClusterConfig, pool: PoolConfig) -> Device | None:
    """The GPU of an engine of the pool. None: the engine computes on the CPU."""
    if config.device_of(pool) == "cpu":
        return None
    from kv_transfer.device.cuda_driver import CudaDevice

    return CudaDevice()


def _prepare(
    config: ClusterConfig, pool: PoolConfig, served: ServedModel, resources: ExitStack
) -> tuple[int, MakeRunner]:
    """The number of KV blocks that an engine gets, and a function that makes its runner around them.

    A model on a GPU is loaded here, because the memory that it leaves may decide the number of blocks.
    """
    if config.device_of(pool) == "cpu":
        return num_blocks(config, pool, served), partial(_cpu_runner, config, pool)
    from engine.kernels.launch import require_device

    require_device()
    from engine.models.loading import load_model
    from engine.runners.cuda import CUDARunner
    from engine.runners.cuda_memory import await_device_memory, profiled_blocks
    from engine.runners.cuda_warmup import warm_up

    assert config.model is not None, "the arithmetic runner takes no GPU"
    engine = pool.engine
    await_device_memory(engine.gpu_memory_utilization)
    with phase("weights"):
        model = load_model(Path(config.model), config.model_dtype, "cuda", longest_sequence(config))
    blocks = profiled_blocks(model, engine) if is_profiled(pool) else num_blocks(config, pool, served)

    def make(cache: Any, host_blocks: int, guidance: Guidance | None) -> Runner:
        runner = CUDARunner(
            model,
            cache.view(-1),
            block_size=engine.block_size,
            max_model_len=engine.max_model_len,
            graph_sizes=engine.cuda_graph_sizes,
            num_host_blocks=host_blocks,
            masker=guidance,
        )
        resources.callback(runner.close)
        with phase("kernels"):
            warm_up(runner, engine)
        return runner

    return blocks, make


def _cpu_runner(
    config: ClusterConfig,
    pool: PoolConfig,
    cache: npt.NDArray[np.uint8],
    host_blocks: int,
    guidance: Guidance | None,
) -> Runner:
    """Loads the model. The runner uses `cache`, uint8 [num_blocks, block_bytes], in place.

    A model is loaded in a thread that ends with it: OpenMP gives each thread that has ever run a loop a team for good,
    and spins no more where all teams together have more threads than there are cores. The step thread is to be alone.
    """
    if config.model is None or config.runner == "arithmetic":
        return ArithmeticRunner(arithmetic_model.cache_view(cache), num_host_blocks=host_blocks)
    with ThreadPoolExecutor(1, "load") as thread:
        return thread.submit(_model_runner, Path(config.model), config, pool, cache, host_blocks, guidance).result()


def _model_runner(
    path: Path,
    config: ClusterConfig,
    pool: PoolConfig,
    cache: npt.NDArray[np.uint8],
    host_blocks: int,
    guidance: Guidance | None,
) -> Runner:
    with phase("torch"):
        import jit.openmp  # noqa: F401  before torch

        # isort: split
        import torch  # takes 1.5 s and 200 MB, which an arithmetic engine does not need

        from engine.models.loading import load_model
        from engine.runners.torch_cpu import TorchCPURunner

    torch.set_num_threads(pool.threads)
    with phase("weights"):
        model = load_model(path, config.model_dtype, "cpu", longest_sequence(config), quantization=config.quantization)
    with phase("kernels"):
        return TorchCPURunner(
            model,
            torch.from_numpy(cache.reshape(-1)),
            block_size=pool.engine.block_size,
            num_threads=pool.threads,
            num_host_blocks=host_blocks,
            masker=guidance,
        )
