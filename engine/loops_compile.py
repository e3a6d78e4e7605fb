"""How the loops are compiled: by numba, kept on disk; where numba is absent not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["COMPILED", "compiled_loop", "one_compiles"]

F = TypeVar("F", bound=Callable[..., Any])

try:
    from engine.kernel_cache import compiled_loop, one_compiles

    COMPILED = True
except ImportError:  # numba is absent
    COMPILED = False

    def compiled_loop(sources: tuple[str, ...]) -> Callable[[F], F]:
        return lambda function: function

    @contextmanager
    def one_compiles(sources: tuple[str, ...]) -> Iterator[None]:
        yield
