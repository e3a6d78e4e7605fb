"""Reports how many KV blocks the profile run finds room for beside an 8B-shaped model, and checks that the largest step
then really fits.
"""

from collections.abc import Iterator

import torch

from bench.gpu.models import BLOCK_SIZE, gpu_runner, large_model
from bench.gpu.report import Column, Item, Note, Table
from bench.gpu.setting import Setting
from engine.config import EngineConfig
from engine.runners.cuda_memory import largest_batch, profiled_blocks
from engine.runners.paged_cache import block_bytes


def run(setting: Setting) -> Iterator[Item]:
    model = large_model(setting)
    config = EngineConfig(
        max_num_batched_tokens=setting.size(8192, 6),
        max_num_seqs=setting.size(128, 2),
        max_model_len=setting.size(8192, 16),
        block_size=BLOCK_SIZE,
        cuda_graph_sizes=setting.size((1, 8, 32, 64, 128), (2,)),
    )
    num_blocks = setting.size(0, 4) or profiled_blocks(model, config)
    num_bytes = num_blocks * block_bytes(model, BLOCK_SIZE)
    cache = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device)
    runner = gpu_runner(model, cache, config.cuda_graph_sizes)
    output = runner.execute(largest_batch(config))
    free_bytes = setting.size(0, 1) or torch.cuda.mem_get_info()[0]
    columns = (
        Column("largest step", "tokens"),
        Column("sequences"),
        Column("utilization"),
        Column("KV blocks", measured=True),
        Column("KV", "GB", measured=True),
        Column("free afterwards", "GB", measured=True),
        Column("largest step", "ms", measured=True),
    )
    row = config.max_num_batched_tokens, config.max_num_seqs, config.gpu_memory_utilization
    yield Table(
        "gpu_memory_utilization",
        columns,
        [(*row, num_blocks, num_bytes / 1e9, free_bytes / 1e9, output.seconds * 1000)],
    )
    yield Note(
        "the cache was allocated, graphs captured and the largest step computed in what the profile run left: "
        "nothing ran out of memory"
    )
