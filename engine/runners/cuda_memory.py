"""How many KV blocks fit beside the model: the largest step is computed once, and what is left of the GPU's memory then
goes to KV.

    blocks = (gpu_memory_utilization * total - used - graphs) / block

used      total - free right after that step, torch's reserves kept: weights, activations and logits, CUDA itself, and
          all that other
          processes hold there
graphs    activations that captured steps keep beside those of ordinary ones, in proportion to the tokens of the largest
"""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.config import EngineConfig
from engine.models.decoder import Decoder
from engine.runner import Batch
from engine.runners.cuda import CUDARunner
from engine.runners.cuda_warmup import IN_EVERY_WAY, step_in_block_1
from engine.runners.paged_cache import block_bytes
from protocol.clock import Clock
from protocol.errors import CapacityError

log = logging.getLogger(__name__)

MEMORY_WAIT_S, MEMORY_POLL_S = 10.0, 0.1
"""Longest wait for memory that another process is giving back, and between two looks."""


def await_memory(
    free_bytes: Callable[[], int], wanted_bytes: int, clock: Clock, sleep: Callable[[float], None]
) -> None:
    """Waits until `wanted_bytes` are free, or MEMORY_WAIT_S have passed: what a dead engine held comes back when the
    last peer has unmapped it, and the driver says so to nobody.
    """
    until = clock() + MEMORY_WAIT_S
    while (free := free_bytes()) < wanted_bytes:
        if clock() >= until:
            log.warning("others hold memory of this GPU", extra={"free_bytes": free, "wanted_bytes": wanted_bytes})
            return
        sleep(MEMORY_POLL_S)


def await_device_memory(utilization: float) -> None:
    """`await_memory` of this process's GPU: the share of it that the engine was given."""
    total = torch.cuda.mem_get_info()[1]
    await_memory(lambda: torch.cuda.mem_get_info()[0], int(utilization * total), time.monotonic, time.sleep)


def kv_blocks(*, total_bytes: int, free_bytes: int, graph_bytes: int, utilization: float, block_bytes: int) -> int:
    """Raises CapacityError where there is no room for two."""
    num_bytes = int(utilization * total_bytes) - (total_bytes - free_bytes) - graph_bytes
    if num_bytes < 2 * block_bytes:
        raise CapacityError(
            f"gpu_memory_utilization: {utilization:g} of {total_bytes} bytes leaves {max(0, num_bytes)} to KV beside "
            "the model and its "
            f"largest step, two blocks need {2 * block_bytes}: lower max_num_batched_tokens or max_num_seqs"
        )
    return num_bytes // block_bytes


def profiled_blocks(model: Decoder, config: EngineConfig) -> int:
    """Computes the largest step on the model's GPU. Raises CapacityError, also where that step itself does not fit."""
    device = model.embed.device
    size = block_bytes(model, config.block_size)
    cache = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    runner = CUDARunner(model, cache, block_size=config.block_size, max_model_len=config.max_model_len)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        runner.execute(largest_batch(config))
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens does not fit: {error}"
        ) from None
    peak = torch.cuda.max_memory_allocated(device) - before
    free, total = torch.cuda.mem_get_info(device)
    return kv_blocks(
        total_bytes=total,
        free_bytes=free,
        graph_bytes=peak * max(config.cuda_graph_sizes, default=0) // config.max_num_batched_tokens,
        utilization=config.gpu_memory_utilization,
        block_bytes=size,
    )


def largest_batch(config: EngineConfig) -> Batch:
    """As many tokens and sequences as a step may have; all of them sample, in every way and after drafts. All in block
    1.
    """
    num_seqs = config.max_num_seqs
    scheduled = np.full(num_seqs, config.max_num_batched_tokens // num_seqs, np.int32)
    scheduled[: config.max_num_batched_tokens % num_seqs] += 1
    scheduled = np.minimum(scheduled, config.max_model_len)
    batch = step_in_block_1(config, scheduled.tolist(), 0, params=IN_EVERY_WAY)
    if config.num_speculative_tokens:
        batch.num_drafts = np.minimum(config.num_speculative_tokens, scheduled - 1)
    return batch
