"""Content hashes of full KV blocks: the key of every prefix cache, the same in every process.

hash(block i) = blake2b-128(hash(block i-1) || token ids of block i as little-endian int32). The chain starts from
blake2b-128(salt length || salt || model fingerprint), so that two models or two salts never share a hash.

A single hash is 16 bytes. Where many are moved, they are the rows of an int32 array [n, 4] of the same bytes.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from protocol.arrays import Int32

HASH_BYTES = 16
HASH_WORDS = HASH_BYTES // 4
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""A copy of it begins every hash: copying is twice as fast as a constructor with arguments."""


def root_hash(model_fingerprint: bytes, cache_salt: str = "") -> bytes:
    """The parent hash of every first block, 16 bytes."""
    salt = cache_salt.encode()
    return hashlib.blake2b(len(salt).to_bytes(4, "little") + salt + model_fingerprint, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """The hash of one full block, 16 bytes. `token_ids` are block_size little-endian int32 numbers as bytes."""
    state = _EMPTY.copy()
    state.update(parent + token_ids)
    return state.digest()


def chain_hashes(root: bytes, token_ids: Int32, block_size: int) -> list[bytes]:
    """The hashes of all num_tokens // block_size full blocks of a prompt. `token_ids` is int32 [num_tokens]."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = block_size * 4
    chain = [root]
    for start in range(0, len(data) - width + 1, width):
        chain.append(block_hash(chain[-1], data[start : start + width]))
    return chain[1:]


def to_rows(hashes: Iterable[bytes]) -> Int32:
    """Hashes as an array, int32 [n, 4]."""
    return np.frombuffer(bytearray().join(hashes), np.int32).reshape(-1, HASH_WORDS)


def from_rows(rows: Int32) -> tuple[bytes, ...]:
    """Hashes from an array, int32 [n, 4]."""
    data = rows.tobytes()
    return tuple(data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES))
