"""Compiled kernels on disk. Each has a file that is named after all that its code depends on, so that every checkout
and every unpacked job of one user can share it. Kernels can be compiled again: whatever is wrong with the folder or a
file makes a start some seconds longer, but never fails it.
"""

import fcntl
import hashlib
import logging
import os
import pickle
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

from jit.cache_dir import cache_dir
from jit.kept_files import digest, keep, read_kept
from jit.openmp import PARALLEL

F = TypeVar("F", bound=Callable[..., Any])
Sources = tuple[str, ...]
"""Paths of the files that machine code is made of: the files of the function, of the functions that it calls, and of
the constants that become part of the code.
"""

_log = logging.getLogger(__name__)
_told = Event()
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"


class KernelCache:
    """The cache of one function, with the methods that numba calls. A file holds a digest, then the
    pickled machine code.

    numba's own cache believes whatever it reads, so that a damaged file ends the process. It also pickles what a
    function closes over, and kernels close over emitters whose pickles differ in every process. Here `key` stands for
    these emitters and `folder` for the sources. The module's name is part of a file's name too, since numba imports the
    module to load the code.
    """

    def __init__(self, function: Callable[..., Any], key: str, folder: Path) -> None:
        self.cache_path = str(folder)
        self._folder = folder
        self._key = f"{function.__module__} {function.__qualname__} {function.__code__.co_firstlineno} {key}"
        self._name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__.rpartition('.')[2]}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function; None if the cache does not have it."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        try:
            code = read_kept(path)
        except OSError as error:
            _say_once(f"{path}: cannot be read: {error.strerror}")
            return None
        if code is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keeps a compiled function, unless its code holds addresses of this process."""
        if compiled.library.has_dynamic_globals or any(not loop.can_cache for loop in compiled.lifted):
            return
        try:
            keep(self._path(signature, compiled.codegen), dumps(compiled._reduce()))
        except OSError as error:
            _say_once(f"{self._folder}: cannot be written: {error.strerror}")

    def _path(self, signature: Any, codegen: Any) -> Path:
        """The file for a signature. The code also depends on the CPU that it is made for."""
        made_for = f"{signature} {codegen.magic_tuple()} {self._key}"
        return self._folder / f"{self._name}-{digest(made_for.encode()).hex()}.nbc"


def _say_once(problem: str) -> None:
    """Warns once in a process, since what is wrong with one file is wrong with the next."""
    if not _told.is_set():
        _told.set()
        _log.warning("compiled kernels: %s; compiled in memory, which takes this start some seconds longer", problem)


def folder_of(sources: Sources) -> Path:
    """<cache>/kernels/<hash of the sources, this file, the compiler's versions and `PARALLEL`>. It may not exist yet.

    Raises OSError where a source cannot be read or there is no place for a cache.
    """
    digests = b"".join(digest(Path(path).read_bytes()) for path in (*sources, __file__))
    name = hashlib.blake2b(digests + f"{_VERSIONS} {PARALLEL}".encode(), digest_size=12).hexdigest()
    return cache_dir() / "kernels" / name


def variant(function: F, key: str) -> F:
    """Names a function after the constants that it closes over, and returns it. Its symbols carry the name. Without it,
    two variants compiled by two processes could have the same symbols, and a third process that loads both would run
    one in place of the other.
    """
    function.__qualname__ += f"_{key}"
    return function


def compiled(sources: Sources, key: str = "") -> Callable[[F], F]:
    """Decorates a function that numba compiles on its first call and that runs without the interpreter lock. Where the
    cache cannot be written, the code is kept in memory alone.

    `key` names the constants that the function closes over. Functions that it calls and that close over constants must
    be `variant`s.
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


def compiled_loop(sources: Sources, *, nogil: bool = False) -> Callable[[F], F]:
    """Decorates a loop that runs on one thread. One of about a microsecond keeps the interpreter lock, since getting it
    back may take milliseconds; with `nogil` a long one lets go of it.

    The loop must allocate nothing: numba's counting of array references, which would take longer than some
    loops, is off.
    """

    def compile_it(function: F) -> F:
        loop: F = _cached(
            numba.njit(function, error_model="numpy", boundscheck=False, nogil=nogil, _nrt=False), sources, ""
        )
        return loop

    return compile_it


def _cached(dispatcher: Any, sources: Sources, key: str) -> Any:
    """Gives a dispatcher its cache and returns it. To callers it is still the function that it compiles."""
    try:
        folder = folder_of(sources)
    except OSError as error:
        _say_once(str(error))
    else:
        dispatcher._cache = KernelCache(dispatcher.py_func, key, folder)
    return dispatcher


@contextmanager
def one_compiles(sources: Sources) -> Iterator[None]:
    """A lock that one process holds at a time: the others wait, then find what it compiled. Where no file can be
    locked, each process compiles for itself.
    """
    try:
        folder = folder_of(sources)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # a network file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
