"""Shared memory files: capacity, ownership, stale ones."""

import errno
import mmap
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kv_transfer.segment import DIRECTORY, PREFIX, SharedSegment, remove_stale
from protocol.errors import CapacityError, PullFailed


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert list(DIRECTORY.glob(f"{PREFIX}{name}*")) == []


def create(name: str, num_blocks: int = 4) -> SharedSegment:
    return SharedSegment.create(name, block_bytes=1000, num_blocks=num_blocks, num_words=3)


def test_a_new_segment_is_zero_aligned_and_complete(name: str) -> None:
    segment = create(name)
    assert segment.cache.shape == (4, 1000)
    assert not segment.cache.any()
    assert segment.words.tolist() == [0, 0, 0]
    assert segment.cache.ctypes.data % 4096 == 0
    stat = segment.path.stat()
    assert stat.st_blocks * 512 >= stat.st_size
    segment.close()
    segment.close()


def test_opening_maps_no_pages_under_the_interpreters_lock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens beside a loop of the same process."""
    segment = create(name)
    flags: list[int] = []
    map_file = mmap.mmap

    def watched(*arguments: Any, **options: Any) -> mmap.mmap:
        flags.append(options["flags"])
        return map_file(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", watched)
    opened = SharedSegment.open(segment.path, segment.nonce)
    assert flags == [mmap.MAP_SHARED] and np.array_equal(opened.cache, segment.cache)
    opened.close()
    segment.close()


def test_too_little_shared_memory_is_an_error_that_names_both_sides(name: str) -> None:
    volume = os.statvfs(DIRECTORY)
    available = volume.f_bavail * volume.f_frsize
    with pytest.raises(
        CapacityError, match=r"/dev/shm: \d+ bytes of shared memory needed for the KV cache, \d+ available"
    ):
        create(name, available // 1000 + 1)


def test_a_machine_without_shared_memory_is_an_error() -> None:
    with pytest.raises(CapacityError, match="does not exist"):
        SharedSegment.create("x", block_bytes=8, num_blocks=1, num_words=1, directory=DIRECTORY / "nowhere")


def test_shared_memory_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CapacityError, match="/dev/shm: Read-only file system; KV caches lie there"):
        create("x")


def test_the_file_of_a_live_process_is_neither_replaced_nor_removed(name: str) -> None:
    segment = create(name)
    with pytest.raises(CapacityError, match="alive"):
        create(name)
    assert remove_stale(f"{PREFIX}{name}") == []
    segment.close()


def test_a_stale_file_is_replaced_and_removed(name: str) -> None:
    path = DIRECTORY / f"{PREFIX}{name}"
    path.write_bytes(b"left by a dead process")
    segment = create(name)
    assert segment.cache.shape == (4, 1000)
    segment.close()
    path.write_bytes(b"again")
    (DIRECTORY / f"{PREFIX}{name}-2").write_bytes(b"and again")
    assert [path.name for path in remove_stale(f"{PREFIX}{name}")] == [f"{PREFIX}{name}", f"{PREFIX}{name}-2"]


def test_what_is_mapped_outlives_the_file(name: str) -> None:
    segment = create(name)
    segment.cache[2] = 7
    reader = SharedSegment.open(segment.path, segment.nonce)
    kept = segment.cache
    segment.close()
    assert np.array_equal(reader.cache, kept)
    with pytest.raises(PullFailed):
        SharedSegment.open(segment.path, segment.nonce)
    reader.close()


def test_an_empty_file_is_no_segment(name: str) -> None:
    path = DIRECTORY / f"{PREFIX}{name}"
    path.touch()
    with pytest.raises(PullFailed):
        SharedSegment.open(path, b"")
    path.unlink()
