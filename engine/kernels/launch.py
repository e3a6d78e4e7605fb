"""Where kernels get `triton` and `tl` from: the real ones, or a stand-in that lets kernels be decorated and explains
itself when used. It also notes each variant of a kernel that is compiled.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from protocol.errors import ConfigError

MISSING = (
    "GPU kernels need Triton, which is not installed: pip install 'triton>=3.6' (the extra `gpu`), or choose `device: "
    "cpu`"
)


class MissingTriton:
    """Takes the place of `triton` and `triton.language`. A decorated kernel becomes this object, so launching it raises
    ConfigError.
    """

    def jit(self, kernel: object = None, **options: object) -> "MissingTriton":
        return self

    def constexpr(self, value: object) -> object:
        return value

    def __call__(self, kernel: object) -> "MissingTriton":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(MISSING)

    def __getitem__(self, grid: object) -> Any:
        raise ConfigError(MISSING)


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = MissingTriton()

HAS_TRITON = not isinstance(triton, MissingTriton)
TRITON_VERSION: str | None = getattr(triton, "__version__", None)
"""Asked of the module, because the distributions that bring it have several names."""
# Triton fixes at decoration whether a kernel is compiled or interpreted. Kernels read this flag where the interpreter
# is wrong: its `tl.dot` on bf16 gives garbage without a word, so operands are widened to float32 first.
INTERPRETED = tl.constexpr(HAS_TRITON and bool(triton.knobs.runtime.interpret))

compiled: list[str] = []
"""The variants of kernels that this process has compiled so far, in order: each a kernel's name and what Triton has
specialised it for, which are types, constants, and numbers and addresses that are 1 or divisible by 16.

Variants that Triton finds in its folder on disk are listed too, since loading one also holds up a step. An interpreted
kernel is never compiled; its variants are listed at the first launch that would have compiled them.
"""


def _note_compiled(*, key: str, fn: Any, **details: object) -> None:
    """Triton calls it after it has compiled a variant, in the thread that launches."""
    compiled.append(f"{fn.name} {key}")


def _note_interpreted() -> None:
    """Lets interpreted launches look for their variant as compiled ones do, by Triton's own code for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import KernelParam, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    run = InterpretedFunction.run

    @functools.cache
    def specialiser(kernel: Any) -> Callable[..., tuple[object, object, object]]:
        signature = inspect.signature(kernel.fn)
        fixed, unaligned = (
            kernel.kwargs.get(name) or () for name in ("do_not_specialize", "do_not_specialize_on_alignment")
        )
        params = [
            KernelParam(number, param, param.name in fixed, param.name in unaligned)
            for number, param in enumerate(signature.parameters.values())
        ]
        specialise: Callable[..., tuple[object, object, object]] = create_function_from_signature(
            signature, params, backend
        )
        return specialise

    def noted(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        _, specialised, launch_options = specialiser(kernel)(*arguments, **options)
        variant = f"{kernel.__name__} {specialised}{launch_options}"
        if variant not in compiled:
            compiled.append(variant)
        return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = noted


if INTERPRETED:
    _note_interpreted()
elif HAS_TRITON:
    triton.knobs.runtime.jit_post_compile_hook = _note_compiled


def require_device() -> None:
    """Raises ConfigError where kernels cannot be launched; a runner on CUDA asks before it loads a model."""
    if not HAS_TRITON:
        raise ConfigError(MISSING)
    if not INTERPRETED and not torch.cuda.is_available():
        raise ConfigError(
            "GPU kernels need a CUDA device and torch sees none: check the driver and torch's build, or choose "
            "`device: cpu`"
        )
