import zlib

import numpy as np

from kv_transfer.checksum import checksum_of


def test_each_block_has_the_checksum_of_its_own_bytes() -> None:
    cache = np.arange(64, dtype=np.uint8).reshape(4, 16)
    checksum = checksum_of(cache)
    assert checksum([2, 0]) == (zlib.crc32(bytes(range(32, 48))), zlib.crc32(bytes(range(16))))
    before = checksum([1])
    cache[1, 7] ^= 1
    assert checksum([1]) != before and checksum([]) == ()
