"""Compiled kernels on disk: one file each, named after all that its code depends on, so that every checkout and every
unpacked job of one user shares them. They can be made again, so whatever is wrong with the folder or a file costs a
start seconds and never the start.
"""

import fcntl
import hashlib
import importlib
import logging
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from engine.cache_dir import cache_dir

F = TypeVar("F", bound=Callable[..., Any])
Sources = tuple[str, ...]
"""Paths of the files that machine code is made of: the function's own, and those of what it calls and of the constants
it bakes in.
"""

_log = logging.getLogger(__name__)
_told = Event()
_DIGEST_BYTES = 16
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"


def _omp_available() -> bool:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    return True


PARALLEL = _omp_available()
"""Loops run in parallel only on OpenMP: it shares torch's threads, where numba's own pool would fight them for the
cores.
"""

if PARALLEL:
    numba.config.THREADING_LAYER = "omp"


class KernelCache:
    """What numba asks of the cache of one function. A file is a digest, then the pickled machine code.

    numba's own cache believes whatever it reads, and a damaged file ends the process; it also pickles what a function
    closes over, and kernels close over emitters whose pickles differ in every process. `key` stands for those, `folder`
    for the source. The module's name counts too, for numba imports it to load the code.
    """

    def __init__(self, function: Callable[..., Any], key: str, folder: Path) -> None:
        self.cache_path = str(folder)
        self._folder, self._key = (
            folder,
            f"{function.__module__} {function.__qualname__} {function.__code__.co_firstlineno} {key}",
        )
        self._name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__.rpartition('.')[2]}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function, None if it is not here."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _say_once(f"{path}: cannot be read: {error.strerror}")
            return None
        digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if _digest(code) != digest:
            _say_once(f"{path}: damaged")
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if compiled.library.has_dynamic_globals or any(not loop.can_cache for loop in compiled.lifted):
            return  # it holds addresses of this process
        code = dumps(compiled._reduce())
        path = self._path(signature, compiled.codegen)
        written = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            written.write_bytes(_digest(code) + code)
            written.replace(path)
        except OSError as error:
            _say_once(f"{self._folder}: cannot be written: {error.strerror}")
            with suppress(OSError):
                written.unlink(missing_ok=True)

    def _path(self, signature: Any, codegen: Any) -> Path:
        """The code depends on the types of the arguments and on the CPU that it is made for, too."""
        made_for = f"{signature} {codegen.magic_tuple()} {self._key}"
        return self._folder / f"{self._name}-{_digest(made_for.encode()).hex()}.nbc"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _say_once(problem: str) -> None:
    """Once in a process: what is wrong with one file is wrong with the next."""
    if not _told.is_set():
        _told.set()
        _log.warning("compiled kernels: %s; compiled in memory, which takes this start some seconds longer", problem)


def folder_of(sources: Sources) -> Path:
    """<cache>/kernels/<hash of the sources, of this file, the compiler's versions and `PARALLEL`>; not made yet.

    Raises OSError where a source cannot be read or there is no place for a cache.
    """
    digests = b"".join(_digest(Path(path).read_bytes()) for path in (*sources, __file__))
    name = hashlib.blake2b(digests + f"{_VERSIONS} {PARALLEL}".encode(), digest_size=12).hexdigest()
    return cache_dir() / "kernels" / name


def variant(function: F, key: str) -> F:
    """The function, named after the constants it closes over. Its symbols carry the name: without it those of two
    variants, compiled by two processes, may be the same, and a third process that loads both would run one for the
    other.
    """
    function.__qualname__ += f"_{key}"
    return function


def compiled(sources: Sources, key: str = "") -> Callable[[F], F]:
    """Functions compiled by numba on their first call, without the interpreter lock; in memory only where the cache
    cannot be written.

    `key` names the constants that the function closes over; functions that it calls and that close over any must be
    `variant`s.
    """

    def compile_it(function: F) -> F:
        named = variant(function, key) if key else function
        kernel: F = _cached(
            numba.njit(named, fastmath=True, nogil=True, error_model="numpy", boundscheck=False, parallel=PARALLEL),
            sources,
            key,
        )
        return kernel

    return compile_it


def compiled_loop(sources: Sources) -> Callable[[F], F]:
    """The same for loops of a microsecond: on one thread, and the interpreter lock is kept, for getting it back may
    take milliseconds.

    They must allocate nothing: numba's counting of array references, which would take longer than some loops, is off.
    """

    def compile_it(function: F) -> F:
        loop: F = _cached(numba.njit(function, error_model="numpy", boundscheck=False, _nrt=False), sources, "")
        return loop

    return compile_it


def _cached(dispatcher: Any, sources: Sources, key: str) -> Any:
    """The dispatcher itself: to callers it is still the function that it compiles."""
    try:
        folder = folder_of(sources)
    except OSError as error:
        _say_once(str(error))
    else:
        dispatcher._cache = KernelCache(dispatcher.py_func, key, folder)
    return dispatcher


@contextmanager
def one_compiles(sources: Sources) -> Iterator[None]:
    """Held by one process at a time: the others wait, then find what it compiled. Where nothing can be locked, each
    compiles for itself.
    """
    try:
        folder = folder_of(sources)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # a network's file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
