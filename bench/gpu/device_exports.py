"""The GPU as transfers see it, and the transport of the pulling side; in a rehearsal the GPU is `FakeDevice`."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu.setting import FAKE_GPUS, VISIBLE, Setting
from engine.kernels.block_copy import pull_blocks, warm_up_pulls
from kv_transfer.config import TransferConfig
from kv_transfer.device.cuda_driver import CudaDevice
from kv_transfer.device.device import Device, KVCache, Tensor
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.exports import Export
from kv_transfer.select import choose
from kv_transfer.transport import Notify, Transport


def open_device(setting: Setting, name: str) -> Device:
    """The one GPU that this process sees. `name`: no two processes use the same."""
    return fake_device(name) if setting.rehearsal else CudaDevice(0)


def fake_device(name: str) -> FakeDevice:
    """Like CUDA, it finds out which GPU it is from the environment. The GPU is part of its files' names."""
    bus_id = os.environ[VISIBLE]
    return FakeDevice(f"{name}-{bus_id}", bus_id, frozenset(FAKE_GPUS))


def export(kind: str, device: Device, name: str, num_blocks: int, block_bytes: int) -> Export:
    """A cache for one peer, a lease word for each of its blocks."""
    config = TransferConfig(transport=kind)
    return Export(
        config, name, device, num_blocks=num_blocks, block_bytes=block_bytes, num_words=num_blocks, num_peers=1
    )


def importing(kind: str, setting: Setting, cache: KVCache, notify: Notify) -> Transport:
    """The transport of the process that pulls into `cache`."""
    if not setting.rehearsal:
        warm_up_pulls(cache.tensor)
    gathering = replace(cache, gather=setting.size(pull_blocks, _gather_on_host))
    return choose(TransferConfig(transport=kind), gathering, notify)


def as_tensor(cache: Tensor) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes]: the fake device's memory is an array."""
    tensor: torch.Tensor = torch.from_numpy(cache) if isinstance(cache, np.ndarray) else cache
    return tensor


def _gather_on_host(src: Any, src_ids: Any, dst: Any, dst_ids: Any) -> None:
    """The interpreter would write to all that a kernel is given, and a peer's memory is mapped read-only."""
    dst[dst_ids] = src[src_ids]
