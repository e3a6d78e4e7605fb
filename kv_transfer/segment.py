"""A file in POSIX shared memory: header, lease words, KV cache. One prefill engine creates it, decode engines map it
read-only.

The cache of an engine on a GPU lies in the GPU's memory, and its file has lease words alone. `host_staged` keeps its
channels in another file, in the cache's place.

    0        header: magic, version, sizes, offsets, nonce
    4096     lease words, uint64 [num_words]
    cache    uint8 [num_blocks, block_bytes], from the next page on

The creator holds a lock on the file for as long as it lives, so anyone can tell a live file from one that a dead
process left. Mappings outlive the file and its creator: what is mapped stays readable.
"""

import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_transfer.layout import Blocks
from kv_transfer.lease import Words
from protocol.errors import CapacityError, PullFailed

DIRECTORY = Path("/dev/shm")
PREFIX = "twopass-"
NONCE_BYTES = 16

_PAGE = 4096
_MAGIC = b"twopass\0"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQQQ16s")
"""Its fields are magic, version, block_bytes, num_blocks, num_words, offset of the cache, nonce."""


class SharedSegment:
    """`create` and `open` make one. Arrays stay valid for as long as someone refers to them, also after `close`."""

    def __init__(self, path: Path, memory: mmap.mmap, lock_fd: int | None) -> None:
        _, _, block_bytes, num_blocks, num_words, cache_offset, nonce = _HEADER.unpack_from(memory)
        self.path = path
        self.nonce: bytes = nonce
        self.cache_offset: int = cache_offset
        self.words: Words = np.frombuffer(memory, np.uint64, num_words, _PAGE)
        self.cache: Blocks = np.frombuffer(memory, np.uint8, num_blocks * block_bytes, cache_offset).reshape(
            num_blocks, block_bytes
        )
        self._lock_fd = lock_fd

    @classmethod
    def create(
        cls, name: str, *, block_bytes: int, num_blocks: int, num_words: int, directory: Path = DIRECTORY
    ) -> "SharedSegment":
        """Makes a zeroed segment `twopass-<name>` whose pages all exist: no later access can lack memory.

        Raises CapacityError when there is too little shared memory, or a live process owns that name.
        """
        path = directory / f"{PREFIX}{name}"
        cache_offset = _round_up(_PAGE + 8 * num_words)
        num_bytes = cache_offset + _round_up(num_blocks * block_bytes)
        fd = _create_locked(path)
        try:
            _reserve(fd, path, num_bytes)
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (CapacityError, OSError):
            path.unlink()
            os.close(fd)
            raise
        _HEADER.pack_into(
            memory,
            0,
            _MAGIC,
            _VERSION,
            block_bytes,
            num_blocks,
            num_words,
            cache_offset,
            secrets.token_bytes(NONCE_BYTES),
        )
        return cls(path, memory, fd)

    @classmethod
    def open(cls, path: Path, nonce: bytes) -> "SharedSegment":
        """Maps a segment read-only, with all its pages. Raises PullFailed when it is gone, or another one lies at this
        path: then the memory is not shared.
        """
        fd = open_verified(path, nonce, os.O_RDONLY)
        try:
            memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        # A GiB takes a second, which MAP_POPULATE would spend under the interpreter's lock; numpy reads without it.
        np.frombuffer(memory, np.uint8)[::_PAGE].max()
        return cls(path, memory, None)

    def close(self) -> None:
        """The creator removes the file; a reader only lets go. Arrays that others hold keep their memory until they let
        go, too.
        """
        if self._lock_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None
        self.words, self.cache = np.zeros(0, np.uint64), np.zeros((0, 0), np.uint8)


def open_verified(path: Path, nonce: bytes, flags: int) -> int:
    """Returns a file descriptor of the segment that was offered. Raises PullFailed when it is gone, or another one lies
    at its path.
    """
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise PullFailed(f"{path}: {error.strerror}") from error
    try:
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[:8] != _MAGIC or header[-NONCE_BYTES:] != nonce:
            raise PullFailed(f"{path}: not the segment that was offered; its owner's shared memory is not ours")
        if (version := _HEADER.unpack(header)[1]) != _VERSION:
            raise PullFailed(f"{path}: version {version}, this code knows {_VERSION}")
    except PullFailed:
        os.close(fd)
        raise
    return fd


def owner_lives(fd: int) -> bool:
    """Says whether the segment's creator still runs and has not closed it: for so long it holds the file's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def remove_stale(prefix: str = PREFIX, directory: Path = DIRECTORY) -> list[Path]:
    """Removes the files whose creator is dead and whose name begins with `prefix`; returns them."""
    return [path for path in sorted(directory.glob(f"{prefix}*")) if _remove_if_stale(path)]


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        with _locked(fd) as locked:
            if not locked or not _is_at(fd, path):
                return False
            path.unlink()
            return True
    finally:
        os.close(fd)


@contextmanager
def _locked(fd: int) -> Iterator[bool]:
    """Says whether the file could be locked. It does not wait."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True


def _is_at(fd: int, path: Path) -> bool:
    """Says whether the open file is still the one at `path`: a remover may have been faster than our lock."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _create_locked(path: Path) -> int:
    """Makes a new empty file and locks it. A file that a dead process left is replaced. Raises CapacityError if its
    owner lives.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if not _remove_if_stale(path) and path.exists():
                raise CapacityError(f"{path} belongs to a process that is alive") from None
            continue
        except FileNotFoundError:
            raise CapacityError(f"{path.parent} does not exist: this machine has no POSIX shared memory") from None
        except OSError as error:
            raise CapacityError(
                f"{path.parent}: {error.strerror}; KV caches lie there, in POSIX shared memory"
            ) from None
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_at(fd, path):
            return fd
        os.close(fd)


def _reserve(fd: int, path: Path, num_bytes: int) -> None:
    """Makes all pages exist now; otherwise the first write to a missing one would kill the process."""
    volume = os.fstatvfs(fd)
    available = volume.f_bavail * volume.f_frsize
    message = f"{path.parent}: {num_bytes} bytes of shared memory needed for the KV cache, {available} available"
    if num_bytes > available:
        raise CapacityError(message)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise CapacityError(message) from error


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
