"""Where kernels get `triton` and `tl` from: the real ones, or a stand-in that lets kernels be decorated and explains
itself when used.
"""

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


def require_device() -> None:
    """Raises ConfigError where kernels cannot be launched; a runner on CUDA asks before it loads a model."""
    if not HAS_TRITON:
        raise ConfigError(MISSING)
    if not INTERPRETED and not torch.cuda.is_available():
        raise ConfigError(
            "GPU kernels need a CUDA device and torch sees none: check the driver and torch's build, or choose "
            "`device: cpu`"
        )
