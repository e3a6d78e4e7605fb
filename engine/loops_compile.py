"""How the loops are compiled: by numba, kept on disk; where numba is absent not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["COMPILED", "compiled_loop", "one_compiles"]

try:
    from engine.kernel_cache import compiled_loop, one_compiles

    COMPILED = True
except ImportError:  # numba is absent
    COMPILED = False

    def compiled_loop(function: Callable[..., Any]) -> Any:
        return function

    @contextmanager
    def one_compiles(py_file: str) -> Iterator[None]:
        yield
