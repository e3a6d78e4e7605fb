"""Elements of arrays as compiled functions see them: bf16 is stored as uint16, float16 as int16, float32 as it is; all
sums are float32.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from protocol.arrays import Float32

SOURCES = (__file__,)

Stored = npt.NDArray[np.uint16] | npt.NDArray[np.int16] | Float32
"""An array in the model's dtype."""

HAS_HALF = binding.get_host_cpu_features().get("f16c", True)
"""Whether the CPU has instructions that convert float16. Only x86 CPUs from before AVX2 may lack them; LLVM then calls
functions that are not there.
"""

LOG2E = np.float32(1.4426950408889634)

# 2 ** f on [0, 1] by Chebyshev interpolation of degree 6, lowest power first; relative error 2.5e-9
E0, E1, E2, E3, E4, E5, E6 = (
    np.float32(c)
    for c in (
        1.0000000025,
        0.6931469327588,
        0.2402304544125,
        0.05548063019600,
        0.009684186311644,
        0.001239133182310,
        0.0002186578482386,
    )
)


@intrinsic
def bits_to_float(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def float_to_bits(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def half_to_float(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), context.get_value_type(types.float32))

    return types.float32(types.int16), generate


@intrinsic
def float_to_half(typingctx: Any, value: Any) -> Any:
    """Rounded to nearest even; infinite beyond 65504."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), context.get_value_type(types.int16))

    return types.int16(types.float32), generate


def load(x: Any) -> Any:
    """A stored element as float32."""


@overload(load, inline="always")
def _load(x: Any) -> Any:
    if x == types.uint16:

        def load_bf16(x: Any) -> Any:
            return bits_to_float(np.uint32(x) << np.uint32(16))

        return load_bf16

    if x == types.int16:

        def load_half(x: Any) -> Any:
            return half_to_float(x)

        return load_half

    def load_float(x: Any) -> Any:
        return x

    return load_float


def store(array: Stored, row: int, column: int, value: Any) -> None:
    """array[row, column] = value, rounded to nearest even if it is bf16 or float16."""


@overload(store, inline="always")
def _store(array: Any, row: Any, column: Any, value: Any) -> Any:
    if array.dtype == types.uint16:

        def store_bf16(array: Any, row: Any, column: Any, value: Any) -> Any:
            bits = float_to_bits(np.float32(value))
            array[row, column] = np.uint16(
                (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )

        return store_bf16

    if array.dtype == types.int16:

        def store_half(array: Any, row: Any, column: Any, value: Any) -> Any:
            array[row, column] = float_to_half(np.float32(value))

        return store_half

    def store_float(array: Any, row: Any, column: Any, value: Any) -> Any:
        array[row, column] = value

    return store_float


@register_jitable(inline="always")
def exp2(x: Any) -> Any:
    """2 ** x in float32 for x <= 127; 2 ** -126 for anything smaller than -126."""
    x = max(x, np.float32(-126.0))
    whole = np.floor(x)
    f = x - whole
    fraction = E0 + f * (E1 + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
    return fraction * bits_to_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
