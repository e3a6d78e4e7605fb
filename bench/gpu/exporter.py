"""A process that exports caches of known content, does nothing else and can be killed."""

import multiprocessing
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch

from bench.gpu.device_exports import as_tensor, export, open_device
from bench.gpu.free_memory import free_bytes
from bench.gpu.setting import Setting
from kv_transfer.lease import LeaseTable
from kv_transfer.transport import Endpoint

LEASE_ID = 7
"""The lease id in the first lease word."""
START_S = 60.0

Order = tuple[str, int, int] | Literal["free bytes"]
"""Transport, number of blocks and bytes of each, for a new export; or the question for free memory."""

fork = multiprocessing.get_context("fork")


def content(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """Content of an exported cache: int64 [num_blocks, block_bytes / 8], in which all numbers differ."""
    return torch.arange(num_blocks * block_bytes // 8, device=device).view(num_blocks, -1)


class Exporter:
    """The exporting process, a fork of this one. It must be started before this process touches the device. `name`
    names its shared memory, and `gpu` is the number of the GPU that it sees.
    """

    def __init__(self, setting: Setting, name: str, gpu: int) -> None:
        self._wire, theirs = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(setting, name, gpu, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.is_alive():
            self._wire.send(None)
        self.process.join()

    def export(self, kind: str, num_blocks: int, block_bytes: int) -> Endpoint:
        """Exports a new cache in place of the previous one. Raises RuntimeError when the process does not answer."""
        return cast(Endpoint, self._ask((kind, num_blocks, block_bytes)))

    def free_bytes(self) -> int:
        """Free memory of the GPU that the process sees. Raises RuntimeError when the process does not answer."""
        return cast(int, self._ask("free bytes"))

    def _ask(self, order: Order) -> Any:
        self._wire.send(order)
        if not self._wire.poll(START_S):
            raise RuntimeError(f"the exporter did not answer within {START_S:g} s")
        return self._wire.recv()

    def kill(self) -> None:
        """Kills the process with SIGKILL, and returns when it is gone."""
        self.process.kill()
        self.process.join()


def _serve(setting: Setting, name: str, gpu: int, wire: "Connection[Any, Any]") -> None:
    setting.see_only(gpu)
    device = open_device(setting, f"{name}-memory")
    number = 0
    resources = ExitStack()
    while (order := wire.recv()) is not None:
        if order == "free bytes":
            wire.send(free_bytes(setting, device))
            continue
        resources.close()
        kind, num_blocks, block_bytes = order
        number += 1
        exported = export(kind, device, f"{name}-{number}", num_blocks, block_bytes)
        resources.callback(exported.close)
        cache = as_tensor(exported.cache.tensor).view(torch.int64)
        cache.copy_(content(num_blocks, block_bytes, cache.device))
        if not setting.rehearsal:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # only the cache itself is to stay taken when this process dies
        leases = LeaseTable(exported.words, epoch=1)
        leases.write(0, LEASE_ID)
        wire.send(exported.endpoint)
    resources.close()
