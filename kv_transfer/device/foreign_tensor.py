"""A torch tensor over memory that torch did not allocate: our own pool, or a peer's that is mapped here. Triton takes
it like any other.

It goes through DLPack, because that names the device itself: of a pointer into a peer's memory CUDA may say that it
lies on a GPU which this process is not even shown, and torch would refuse it.
"""

import ctypes
from typing import Any

CPU, CUDA = 1, 2
"""DLPack's device types (dlpack.h, DLDeviceType)."""


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, flattened: the nested device and data type hold the same bytes in the same places."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_UNSIGNED = 1
_described: list[object] = []
"""Descriptions of tensors, 100 bytes each. Torch may look at one for as long as its tensor lives, so they stay for
ever.
"""


def foreign_tensor(pointer: int, num_blocks: int, block_bytes: int, device_type: int, ordinal: int) -> Any:
    """Returns uint8 [num_blocks, block_bytes]. The tensor owns nothing: the memory must outlive it and every view of
    it.
    """
    from torch.utils.dlpack import from_dlpack  # where a runner computes with torch, it is loaded already

    shape = (ctypes.c_int64 * 2)(num_blocks, block_bytes)
    description = _DLTensor(
        pointer, device_type, ordinal, 2, _UNSIGNED, 8, 1, ctypes.addressof(shape), None, 0, None, None
    )
    _described.extend((shape, description))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return from_dlpack(new_capsule(ctypes.addressof(description), b"dltensor", None))
