"""Pinned memory for swapped blocks with a registrar of make-believe, and the copies into it on CPU tensors."""

import gc
import mmap
import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runners.cuda_copies import SwapCopies
from engine.runners.host_copies import HostCopies
from engine.runners.swap_space import CudaRegistrar, SwapSpace
from protocol.errors import CapacityError
from tests.engine.runner_driver import make_batch

PAGE = mmap.PAGESIZE


class Registrar:
    def __init__(self, error: str = "") -> None:
        self.pinned: dict[int, int] = {}
        self._error = error

    def register(self, address: int, num_bytes: int) -> None:
        if self._error:
            raise RuntimeError(self._error)
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def mapped(address: int) -> str:
    """What smaps says of the mapping that begins at an address; empty if none does."""
    with open("/proc/self/smaps") as smaps:
        found = re.search(rf"^{address:x}-.*?VmFlags:[^\n]*", smaps.read(), re.MULTILINE | re.DOTALL)
    return found.group() if found else ""


def test_exactly_what_was_asked_for_is_pinned_and_given_back_once() -> None:
    registrar = Registrar()
    num_blocks, block_bytes = 5 << 8, 2 * PAGE  # 10 MiB, which is no power of two
    space = SwapSpace(num_blocks, block_bytes, registrar)
    address = space.blocks.data_ptr()
    assert registrar.pinned == {address: num_blocks * block_bytes}
    assert address % PAGE == 0 and not space.blocks[-1].any()
    space.blocks[-1] = 7
    assert " dc" in mapped(address)  # not inherited by a fork
    space.close()
    assert not registrar.pinned and len(space.blocks) == 0
    gc.collect()
    assert " dc" not in mapped(address)
    space.close()


def test_memory_that_cannot_be_pinned_is_named_with_its_remedy() -> None:
    with pytest.raises(
        CapacityError, match=r"swap_space_bytes: 8192 bytes .* 2 swapped blocks .*: no \(2\); lower it .*`ulimit -l`"
    ):
        SwapSpace(2, 4096, Registrar("no (2)"))
    with pytest.raises(CapacityError, match="swap_space_bytes: .* Cannot allocate memory"):
        SwapSpace(1 << 24, 1 << 30, Registrar())


def test_without_blocks_or_a_gpu_nothing_is_pinned() -> None:
    registrar = Registrar("no")
    for space in (SwapSpace(0, 4096, registrar), SwapSpace(3, 10, None)):
        space.close()
        assert len(space.blocks) == 0


def test_the_driver_s_words_reach_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            self.calls.append(("register", flags))
            return 2

        def cudaHostUnregister(self, address: int) -> int:
            self.calls.append(("unregister", address))
            return 713

        def cudaGetErrorString(self, code: int) -> str:
            return {2: "out of memory", 713: "not registered"}[code]

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("synchronize", 0)))
    with pytest.raises(CapacityError, match=r"out of memory \(2\)"):
        SwapSpace(1, 4096, CudaRegistrar())
    CudaRegistrar().unregister(5)  # a lost device is no error of its own
    assert runtime.calls == [("register", 1), ("synchronize", 0), ("unregister", 5)]


class CountedCopies(TorchDispatchMode):
    num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_neighbours_are_one_copy_in_whatever_order_they_are_named() -> None:
    cache = torch.arange(40 * 8, dtype=torch.uint8).view(40, 8)
    expected, copies = cache.clone(), SwapCopies(cache, 20)
    batch = make_batch([[1]], [0], [1], [[1]])
    batch.swap_out = np.array([[30 - i, 19 - i] for i in range(16)] + [[2, 0]], np.int32)
    batch.swap_in = np.array([[4 + i, 1 + i] for i in range(12)], np.int32)
    with CountedCopies() as counted:  # type: ignore[no-untyped-call]
        assert copies.launch(batch) == (17 + 12) * 8
    assert counted.num_copies == 3
    expected[1:13] = expected[15:27]
    assert torch.equal(cache, expected)


def test_both_sides_of_a_swap_move_every_block_where_it_belongs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        cache = rng.integers(0, 256, (12, 8), np.uint8)
        by_torch, by_numpy = SwapCopies(torch.from_numpy(cache.copy()), 12), HostCopies(cache.copy(), 12)
        batch = make_batch([[1]], [0], [1], [[1]])
        batch.swap_out = np.stack((rng.permutation(12), rng.permutation(12)), axis=1).astype(np.int32)
        batch.swap_in = np.stack((rng.permutation(12), rng.permutation(12)), axis=1).astype(np.int32)
        assert by_torch.launch(batch) == by_numpy.run(batch)[0]
        host = cache[batch.swap_out[np.argsort(batch.swap_out[:, 1]), 0]]
        back = host[batch.swap_in[np.argsort(batch.swap_in[:, 1]), 0]]
        for copies in (by_torch, by_numpy):
            assert np.array_equal(np.asarray(copies.host), host)
            assert np.array_equal(np.asarray(copies._cache), back)
