"""Content hashes of full KV blocks: the key of every prefix cache, the same in every process.

hash(block i) = blake2b-128(hash(block i-1) || token ids of block i as little-endian int32);
the chain starts from blake2b-128(salt length || salt || model fingerprint), so caches of two models or two salts never
meet.

Single hashes are bytes; where many are moved they are rows of an int32 array [n, 4] of the same bytes.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from protocol.arrays import Int32

HASH_BYTES = 16
HASH_WORDS = HASH_BYTES // 4
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""Copied for every hash: twice as fast as a constructor with arguments."""


def root_hash(model_fingerprint: bytes, cache_salt: str = "") -> bytes:
    """The parent of every first block. 16 bytes."""
    salt = cache_salt.encode()
    return hashlib.blake2b(len(salt).to_bytes(4, "little") + salt + model_fingerprint, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Hash of one full block. `token_ids`: little-endian int32 bytes, block_size * 4 of them. 16 bytes."""
    state = _EMPTY.copy()
    state.update(parent + token_ids)
    return state.digest()


def chain_hashes(root: bytes, token_ids: Int32, block_size: int) -> list[bytes]:
    """Hashes of all full blocks of a prompt. `token_ids`: int32 [num_tokens]; returns num_tokens // block_size of
    them.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = block_size * 4
    chain = [root]
    for start in range(0, len(data) - width + 1, width):
        chain.append(block_hash(chain[-1], data[start : start + width]))
    return chain[1:]


def to_rows(hashes: Iterable[bytes]) -> Int32:
    """int32 [n, 4]"""
    return np.frombuffer(bytearray().join(hashes), np.int32).reshape(-1, HASH_WORDS)


def from_rows(rows: Int32) -> tuple[bytes, ...]:
    """`rows`: int32 [n, 4]"""
    data = rows.tobytes()
    return tuple(data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES))
