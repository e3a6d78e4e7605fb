"""A tensor over memory that torch does not own; on the CPU here, where the same description names another device."""

import gc

import numpy as np
import torch

from kv_transfer.device.device import KVCache
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.device.foreign_tensor import CPU, foreign_tensor


def test_it_is_the_memory_itself() -> None:
    memory = np.arange(64, dtype=np.uint8)
    tensor = foreign_tensor(memory.ctypes.data, 4, 16, CPU, 0)
    assert (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()) == (
        torch.uint8,
        (4, 16),
        (16, 1),
        memory.ctypes.data,
    )
    tensor[2, 3] = 200
    assert memory[35] == 200
    assert tensor.view(torch.int64).shape == (4, 2)


def test_views_may_outlive_it_and_nothing_is_freed() -> None:
    memory = np.arange(64, dtype=np.uint8)
    row = foreign_tensor(memory.ctypes.data, 4, 16, CPU, 0)[1]
    gc.collect()
    assert row.tolist() == list(range(16, 32))
    del row
    gc.collect()
    assert memory.tolist() == list(range(64))


def test_a_cache_is_described_by_its_tensor() -> None:
    tensor, device = torch.zeros((3, 8), dtype=torch.uint8), FakeDevice("unused")
    cache = KVCache.on_gpu(device, tensor)
    assert cache == KVCache(tensor.data_ptr(), 3, 8, tensor, device)
    assert (cache.num_bytes, cache.memory, cache.require_device()) == (24, "GPU", device)
