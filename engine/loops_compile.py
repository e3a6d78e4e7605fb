"""How the loops are compiled: by numba, kept on disk, when the first of them is called; where numba is absent not at
all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_HAS_NUMBA = find_spec("numba") is not None


class _Loop:
    """Stands for a function until it is called: importing numba takes most of a second, and most processes that import
    a scheduler never run one."""

    __slots__ = ("_compiled", "_function", "_sources")

    def __init__(self, function: Callable[..., Any], sources: tuple[str, ...]) -> None:
        self._function, self._sources = function, sources
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compiled)(*arguments)

    @property
    def compiled(self) -> Any:
        """numba's dispatcher."""
        if self._compiled is None:
            from engine.kernel_cache import compiled_loop

            self._compiled = compiled_loop(self._sources)(self._function)
        return self._compiled

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a global that a compiled function calls."""
        return self.compiled._numba_type_


def compiled_loop(sources: tuple[str, ...], *, uncompiled: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Makes a compiled function of a plain loop; callers, and their type checker, see the function. `sources`: as in
    kernel_cache.py.

    `uncompiled`: what runs in its stead where numba is absent, if not the loop as it stands.
    """

    def compile_it(function: F) -> F:
        return cast(F, _Loop(function, sources) if _HAS_NUMBA else uncompiled or function)

    return compile_it


def put_compiled(module: dict[str, Any]) -> None:
    """Puts in place of the loops among a module's names what they compile to, for a call through `_Loop` costs a fifth
    of a microsecond.
    """
    module.update({name: value.compiled for name, value in module.items() if isinstance(value, _Loop)})


@contextmanager
def one_compiles(sources: tuple[str, ...]) -> Iterator[None]:
    """As kernel_cache.py's, where anything is compiled."""
    if not _HAS_NUMBA:
        yield
        return
    from engine.kernel_cache import one_compiles

    with one_compiles(sources):
        yield
