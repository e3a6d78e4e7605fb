"""The driver's wrapper against a library of make-believe: what it calls, with what, and what it makes of the
answers.
"""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from kv_transfer.device import cuda_driver
from kv_transfer.device.cuda_driver import CudaDevice
from protocol.errors import CapacityError, ConfigError, PullFailed
from tests.hang import HANG_S


class Library:
    """Real C functions, so that arguments go through ctypes as they would into the driver. `answers` take what arrives
    there.
    """

    def __init__(self, *batched_copies: str) -> None:
        """`batched_copies`: the symbols that this driver has for batches of copies."""
        self.calls: list[str] = []
        self.answers: dict[str, int | Callable[..., int | None]] = {
            "cuDeviceGetPCIBusId": lambda name, size, device: write(name, b"0000:1B:00.0\0"),
            "cuGetErrorString": lambda code, text: put(text, TEXTS.get(code)),
            "cuMemAlloc_v2": lambda pointer, num_bytes: put(pointer, 2**40 + num_bytes),
            "cuStreamCreate": lambda stream, flags: put(stream, 77 + flags),
            "cuEventCreate": lambda event, flags: put(event, 88 + flags),
        }
        batched = {name: cuda_driver._BATCHED_COPIES[name] for name in batched_copies}
        for name, types in (cuda_driver._SIGNATURES | batched).items():
            # As a pointer: of a string, Python would hand the callback a copy.
            seen = [ctypes.c_void_p if kind is ctypes.c_char_p else kind for kind in types]
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *seen)(partial(self._call, name)))

    def _call(self, name: str, *arguments: Any) -> int:
        self.calls.append(name)
        answer = self.answers.get(name, 0)
        return answer if isinstance(answer, int) else answer(*arguments) or 0


TEXTS = {2: b"out of memory", 700: b"an illegal memory access was encountered"}


def put(pointer: Any, value: Any) -> None:
    pointer[0] = value


def write(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


@pytest.fixture
def library() -> Library:
    return Library()


def test_its_context_is_the_device_s_primary_one_bound_once_a_thread(library: Library) -> None:
    device = CudaDevice(0, library)
    assert library.calls == ["cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain"]
    assert device.bus_id == "0000:1b:00.0"
    assert (device.create_stream(), device.create_event()) == (78, 90)  # non-blocking, without timing
    assert library.calls.count("cuCtxSetCurrent") == 1


@pytest.mark.parametrize("act", ["bind", "copy", "gather", "tensor"])
def test_it_is_bound_in_every_thread_that_makes_it_work(library: Library, act: str) -> None:
    """What torch then does by itself finds no GPU here."""
    device, bound = CudaDevice(0, library), list[int]()
    library.answers["cuCtxSetCurrent"] = lambda context: bound.append(threading.get_ident())
    ids = np.zeros(1, np.int64)
    acts: dict[str, Callable[[], object]] = {
        "bind": device.bind,
        "copy": lambda: device.copy(1, 2, 3, 78),
        "gather": lambda: device.gather(lambda *_: None, None, ids, None, ids, 78),
        "tensor": lambda: device.tensor(1, 2, 3),
    }

    def work() -> int:
        for _ in range(2):
            with suppress(RuntimeError, AssertionError, AttributeError):
                acts[act]()
        return threading.get_ident()

    device.bind()
    with ThreadPoolExecutor(1) as other:
        assert bound == [threading.get_ident(), other.submit(work).result(HANG_S)]


def test_pointers_keep_all_their_bits(library: Library) -> None:
    device = CudaDevice(0, library)
    copies: list[tuple[int, ...]] = []
    library.answers["cuMemcpyAsync"] = lambda *arguments: copies.append(arguments)
    pointer = device.allocate(4096)
    assert pointer == 2**40 + 4096
    device.copy(pointer, pointer + 1, 2**33, 78)
    assert copies == [(pointer, pointer + 1, 2**33, 78)]


BATCHES = {"cuMemcpyBatchAsync_v2": 8, "cuMemcpyBatchAsync": 9}
"""Numbers of arguments, as cuda.h of CUDA 13.0 and of CUDA 12.8 declare them."""


@pytest.mark.parametrize("symbols", [(), ("cuMemcpyBatchAsync",), tuple(BATCHES)])
def test_many_copies_are_one_call_where_the_driver_has_batches(symbols: tuple[str, ...]) -> None:
    library = Library(*symbols)
    seen: list[tuple[int, ...]] = []

    def batch(dsts: int, srcs: int, sizes: int, count: int, attributes: Any, first: Any, num: int, *tail: Any) -> None:
        arrays = [np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at)) for at in (dsts, srcs, sizes)]
        seen.extend(tuple(copy) for copy in np.stack(arrays, axis=1).tolist())
        given = attributes.contents
        assert (given.source_access_order, given.flags, ctypes.sizeof(given)) == (1, 0, 24)
        assert (first[0], num, tail[-1], len(tail)) == (0, 1, 78, BATCHES[symbols[0]] - 7)

    library.answers |= dict.fromkeys(symbols, batch)
    library.answers["cuMemcpyAsync"] = lambda dst, src, num_bytes, stream: seen.append((dst, src, num_bytes))
    device = CudaDevice(0, library)
    expected = [(2**40, 2**41, 7), (2**40 + 7, 5, 2**33)]
    rows = np.array(expected, np.int64)
    device.copy_many(rows[:, 0], rows[:, 1], rows[:, 2], 78)  # columns of a table do not lie together
    assert seen == expected
    device.copy_many(rows[:0, 0], rows[:0, 1], rows[:0, 2], 78)
    copies = [call for call in library.calls if call.startswith("cuMemcpy")]
    assert copies == [symbols[0]] if symbols else copies == ["cuMemcpyAsync"] * 2


def test_a_batch_that_fails_is_told_and_one_that_cannot_be_is_done_one_by_one() -> None:
    library = Library("cuMemcpyBatchAsync_v2")
    device, ones = CudaDevice(0, library), np.ones(2, np.int64)
    library.answers["cuMemcpyBatchAsync_v2"] = 700
    with pytest.raises(PullFailed, match="cuMemcpyBatchAsync_v2: an illegal memory access"):
        device.copy_many(ones, ones, ones, 78)
    library.answers["cuMemcpyBatchAsync_v2"] = 801
    device.copy_many(ones, ones, ones, 78)
    device.copy_many(ones, ones, ones, 78)
    assert [call for call in library.calls if call.startswith("cuMemcpy")] == [
        *["cuMemcpyBatchAsync_v2"] * 2,
        *["cuMemcpyAsync"] * 4,
    ]


def test_a_handle_is_64_bytes_passed_by_value(library: Library) -> None:
    device = CudaDevice(0, library)
    handle = bytes(range(64))
    library.answers["cuIpcGetMemHandle"] = lambda answer, pointer: write(ctypes.addressof(answer.contents), handle)
    library.answers["cuIpcOpenMemHandle_v2"] = lambda pointer, given, flags: put(
        pointer, 5 if bytes(given.reserved) == handle else 6
    )
    assert device.share(123) == handle
    assert device.open(handle) == 5


def test_an_event_not_reached_is_no_error_and_a_failed_one_is(library: Library) -> None:
    device = CudaDevice(0, library)
    library.answers["cuEventQuery"] = 600
    assert not device.reached(90)
    library.answers["cuEventQuery"] = 0
    assert device.reached(90)
    library.answers["cuEventQuery"] = 700
    with pytest.raises(PullFailed, match=r"cuEventQuery: an illegal memory access was encountered \(700\)"):
        device.reached(90)
    library.answers["cuEventQuery"] = 12345
    with pytest.raises(PullFailed, match=r"unknown error \(12345\)"):
        device.reached(90)


def test_too_little_memory_and_no_device_are_errors_of_start_up(library: Library) -> None:
    library.answers["cuMemAlloc_v2"] = 2
    with pytest.raises(CapacityError, match="GPU 0: 4096 bytes for the KV cache are not free"):
        CudaDevice(0, library).allocate(4096)
    library.answers["cuDeviceGet"] = 101
    with pytest.raises(ConfigError, match="GPU 3: cuDeviceGet"):
        CudaDevice(3, library)


@pytest.mark.parametrize(
    ("bus_id", "found", "can", "reaches"),
    [
        ("0000:1b:00.0", 101, 0, True),
        ("0000:2c:00.0", 101, 0, None),
        ("0000:2c:00.0", 0, 1, True),
        ("0000:2c:00.0", 0, 0, False),
    ],
)
def test_whether_it_reaches_another(library: Library, bus_id: str, found: int, can: int, reaches: bool | None) -> None:
    library.answers["cuDeviceGetByPCIBusId"] = found
    library.answers["cuDeviceCanAccessPeer"] = lambda answer, device, peer: put(answer, can)
    assert CudaDevice(0, library).reaches(bus_id) is reaches


def test_a_machine_without_the_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libnothing.so.1")
    with pytest.raises(ConfigError, match="need the NVIDIA driver: libnothing.so.1"):
        CudaDevice()
