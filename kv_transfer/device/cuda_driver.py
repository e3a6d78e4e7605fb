"""The CUDA driver behind `Device`. Only this file calls it, through ctypes.

It is the driver's API and not the runtime's: `libcuda.so.1` comes with the GPU's driver under one name and one ABI,
while torch brings a runtime of its own version. Both work in the device's primary context, so pointers and streams are
torch's, too.
"""

import ctypes
import logging
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

from kv_transfer.device.device import Gather, Tensor
from kv_transfer.device.foreign_tensor import CUDA, foreign_tensor
from protocol.arrays import Int64
from protocol.errors import CapacityError, ConfigError, PullFailed

log = logging.getLogger(__name__)

HANDLE_BYTES = 64


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle. It is passed by value."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, two hints for managed memory (CUmemLocation: type, id), flags."""

    _fields_ = (
        ("source_access_order", c_uint),
        ("source_hint", c_int * 2),
        ("destination_hint", c_int * 2),
        ("flags", c_uint),
    )


# cuda.h. Pointers into GPU memory are 64-bit integers, streams, events and contexts opaque pointers.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetByPCIBusId": (POINTER(c_int), c_char_p),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
# The library's symbols, newest first: destinations, sources, sizes, their number, attributes, the first copy of each,
# their number, and the stream. That of CUDA 12.8, unlike that of CUDA 13.0, also says which copy was refused. CUDA 13's
# header gives the newer one the older one's name; in the library each symbol keeps its arguments.
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(_CopyAttributes), POINTER(c_size_t), c_size_t)
_BATCHED_COPIES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyBatchAsync_v2": (*_BATCH, c_void_p),
    "cuMemcpyBatchAsync": (*_BATCH, POINTER(c_size_t), c_void_p),
}
_OUT_OF_MEMORY, _NOT_READY, _NOT_SUPPORTED = 2, 600, 801  # CUresult
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LIBRARY = "libcuda.so.1"


def load_library() -> Any:
    """Raises ConfigError where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(f"transfers between GPUs need the NVIDIA driver: {error}") from error


class CudaDevice:
    """The device that torch calls `cuda:<ordinal>`. Retains its primary context for the life of the process, as torch
    does.
    """

    def __init__(self, ordinal: int = 0, library: Any = None) -> None:
        """Raises ConfigError when the driver or the device is not to be had."""
        self._library: Any = load_library() if library is None else library
        for function, types in _SIGNATURES.items():
            getattr(self._library, function).argtypes = types
        self._batched_copy = _first_of(self._library, _BATCHED_COPIES)
        self.ordinal = ordinal
        self._context = c_void_p()
        self._bound = threading.local()
        self._device = c_int()
        name = ctypes.create_string_buffer(32)
        try:
            self._check("cuInit", 0)
            self._check("cuDeviceGet", byref(self._device), ordinal)
            self._check("cuDeviceGetPCIBusId", name, len(name), self._device)
            self._check("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        except PullFailed as error:
            raise ConfigError(f"GPU {ordinal}: {error}") from error
        self.bus_id = name.value.decode().lower()

    def bind(self) -> None:
        """Binds each thread once: a process of ours computes on one device only."""
        if not getattr(self._bound, "done", False):
            self._check("cuCtxSetCurrent", self._context)
            self._bound.done = True

    def allocate(self, num_bytes: int) -> int:
        pointer = c_uint64()
        self.bind()
        code = self._library.cuMemAlloc_v2(byref(pointer), num_bytes)
        if code == _OUT_OF_MEMORY:
            raise CapacityError(f"GPU {self.ordinal}: {num_bytes} bytes for the KV cache are not free")
        self._raise_if("cuMemAlloc_v2", code)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def share(self, pointer: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        pointer = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", pointer)

    def reaches(self, bus_id: str) -> bool | None:
        peer, can = c_int(), c_int()
        if bus_id == self.bus_id:
            return True
        if self._library.cuDeviceGetByPCIBusId(byref(peer), bus_id.encode()):
            return None
        self._call("cuDeviceCanAccessPeer", byref(can), self._device, peer)
        return bool(can.value)

    def pin(self, address: int, num_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", dst, src, num_bytes, stream)

    def copy_many(self, dsts: Int64, srcs: Int64, sizes: Int64, stream: int) -> None:
        if self._batched_copy and len(sizes):
            code = self._start_batch(self._batched_copy, dsts, srcs, sizes, stream)
            if code != _NOT_SUPPORTED:
                self._raise_if(self._batched_copy, code)
                return
            log.info("GPU %d: no batches of copies; each copy is a call", self.ordinal)
            self._batched_copy = ""
        for dst, src, num_bytes in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
            self.copy(dst, src, num_bytes, stream)

    def clear(self, pointer: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", pointer, 0, num_bytes, stream)

    def gather(self, gather: Gather, src: Tensor, src_ids: Int64, dst: Tensor, dst_ids: Int64, stream: int) -> None:
        import torch

        self.bind()  # a kernel's launcher takes the context that is current
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, self.ordinal)):
            # Pinned, or the upload would wait for the stream. Both tensors are torch's to reuse only behind this
            # stream.
            ids = torch.from_numpy(np.stack((src_ids, dst_ids))).pin_memory().to(self.ordinal, non_blocking=True)
            gather(src, ids[0], dst, ids[1])

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def reached(self, event: int) -> bool:
        self.bind()
        code = self._library.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        self._raise_if("cuEventQuery", code)
        return True

    def tensor(self, pointer: int, num_blocks: int, block_bytes: int) -> Tensor:
        import torch

        self.bind()
        torch.cuda.init()
        return foreign_tensor(pointer, num_blocks, block_bytes, CUDA, self.ordinal)

    def _start_batch(self, name: str, dsts: Int64, srcs: Int64, sizes: Int64, stream: int) -> int:
        """Returns the driver's CUresult. The driver has read the arrays then. It refuses the default stream."""
        attributes, first, refused = _CopyAttributes(source_access_order=_STREAM_ORDER), c_size_t(), c_size_t()
        arrays = [np.ascontiguousarray(array) for array in (dsts, srcs, sizes)]
        addresses = [array.ctypes.data for array in arrays]
        tail = (stream,) if name == "cuMemcpyBatchAsync_v2" else (byref(refused), stream)
        self.bind()
        code: int = getattr(self._library, name)(*addresses, len(sizes), byref(attributes), byref(first), 1, *tail)
        return code

    def _call(self, name: str, *arguments: Any) -> None:
        self.bind()
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        self._raise_if(name, getattr(self._library, name)(*arguments))

    def _raise_if(self, name: str, code: int) -> None:
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            raise PullFailed(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _first_of(library: Any, signatures: dict[str, tuple[Any, ...]]) -> str:
    """Returns the first of these functions that the library has, with its signature set; empty if it has none."""
    for name, types in signatures.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = types
            return name
    return ""
