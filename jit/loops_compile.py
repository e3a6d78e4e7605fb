"""How the loops are compiled: numba compiles them when the first one is called, and keeps the code on disk. Where numba
is absent they stay plain Python.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_HAS_NUMBA = find_spec("numba") is not None


class _Loop:
    """Stands for a function until it is called. Importing numba takes most of a second, and most processes that import
    a scheduler never run one.
    """

    __slots__ = ("_compiled", "_function", "_nogil", "_sources")

    def __init__(self, function: Callable[..., Any], sources: tuple[str, ...], nogil: bool) -> None:
        self._function, self._sources, self._nogil = function, sources, nogil
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compiled)(*arguments)

    @property
    def compiled(self) -> Any:
        """The compiled function, which numba calls a dispatcher."""
        if self._compiled is None:
            from jit.kernel_cache import compiled_loop

            self._compiled = compiled_loop(self._sources, nogil=self._nogil)(self._function)
        return self._compiled

    @property
    def _numba_type_(self) -> Any:
        """The type that numba asks for when a compiled function calls this one."""
        return self.compiled._numba_type_


def compiled_loop(
    sources: tuple[str, ...], *, nogil: bool = False, uncompiled: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Makes a compiled function of a plain loop. Callers, and their type checker, see the loop. `sources` and `nogil`
    are as in kernel_cache.py.

    Where numba is absent, `uncompiled` runs in its place if it is given, and else the loop as it stands.
    """

    def compile_it(function: F) -> F:
        return cast(F, _Loop(function, sources, nogil) if _HAS_NUMBA else uncompiled or function)

    return compile_it


def put_compiled(module: dict[str, Any]) -> None:
    """Replaces the loops among a module's names by their compiled functions, since a call through `_Loop` costs a fifth
    of a microsecond.
    """
    module.update({name: value.compiled for name, value in module.items() if isinstance(value, _Loop)})


@contextmanager
def one_compiles(sources: tuple[str, ...]) -> Iterator[None]:
    """The lock of kernel_cache.py; it locks nothing where nothing is compiled."""
    if not _HAS_NUMBA:
        yield
        return
    from jit.kernel_cache import one_compiles

    with one_compiles(sources):
        yield
