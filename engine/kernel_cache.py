"""Compiled kernels on disk: keyed by their source, so that every checkout and every unpacked job of one user shares them."""

import fcntl
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numba
from numba.core.caching import FunctionCache, UserProvidedCacheLocator

from engine.cache_dir import cache_dir


def _omp_available() -> bool:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    return True


PARALLEL = _omp_available()
"""Loops run in parallel only on OpenMP: it shares torch's threads, where numba's own pool would fight them for the cores."""

if PARALLEL:
    numba.config.THREADING_LAYER = "omp"


class SourceKeyedLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Tells numba to keep compiled functions in <cache>/kernels/<hash of the kernels' source files, this one and `PARALLEL`>.

    Source files are those beside the function's own whose names begin with the same word: kernels call each other across them.
    """

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno
        self._cache_path = str(_folder(py_file))

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Self | None:
        try:
            locator = cls(py_func, py_file)
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


def _folder(py_file: str) -> Path:
    path = Path(py_file)
    sources = sorted(path.parent.glob(f"{path.stem.partition('_')[0]}_*.py"))
    source = b"".join(path.read_bytes() for path in (*sources, Path(__file__))) + (b"omp" if PARALLEL else b"serial")
    return cache_dir() / "kernels" / hashlib.blake2b(source, digest_size=12).hexdigest()


class KeyedCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function on disk, told apart by `key`: numba itself would pickle what the function closes over, and kernels
    close over emitters whose pickles differ in every process. The folder already stands for the code.
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self._key = key
        before = numba.config.CACHE_LOCATOR_CLASSES
        numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{SourceKeyedLocator.__name__}"
        try:
            super().__init__(function)
        finally:
            numba.config.CACHE_LOCATOR_CLASSES = before

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return signature, codegen.magic_tuple(), self._key


def variant(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The function, named after the constants it closes over. Its symbols carry the name: without it those of two variants, compiled by
    two processes, may be the same, and a third process that loads both would run one for the other."""
    function.__qualname__ += f"_{key}"
    return function


def compiled(function: Callable[..., Any], key: str = "") -> Any:
    """The function compiled by numba on its first call, without the interpreter lock; in memory only where the cache cannot be written.

    `key` names the constants that the function closes over; functions that it calls and that close over any must be `variant`s.
    """
    if key:
        function = variant(function, key)
    return _cached(numba.njit(function, fastmath=True, nogil=True, error_model="numpy", boundscheck=False, parallel=PARALLEL), key)


def compiled_loop(function: Callable[..., Any]) -> Any:
    """The same for loops of a microsecond: on one thread, and the interpreter lock is kept, for getting it back may take milliseconds.

    They must allocate nothing: numba's counting of array references, which would take longer than some loops, is off.
    """
    return _cached(numba.njit(function, error_model="numpy", boundscheck=False, _nrt=False), "")


def _cached(dispatcher: Any, key: str) -> Any:
    try:
        dispatcher._cache = KeyedCache(dispatcher.py_func, key)
    except RuntimeError:
        return dispatcher
    return dispatcher


@contextmanager
def one_compiles(py_file: str) -> Iterator[None]:
    """Held by one process at a time: the others wait, then find what it compiled. Two at once could mix up numba's index."""
    try:
        folder = _folder(py_file)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
