"""Content hashes of full KV blocks: the key of every prefix cache, the same in every process.

hash(block i) = blake2b-128(hash(block i-1) || token ids of block i as little-endian int32);
the chain starts from blake2b-128(salt length || salt || model fingerprint), so caches of two models or two salts never meet.
"""

import hashlib

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16


def root_hash(model_fingerprint: bytes, cache_salt: str = "") -> bytes:
    """The parent of every first block. 16 bytes."""
    salt = cache_salt.encode()
    return hashlib.blake2b(len(salt).to_bytes(4, "little") + salt + model_fingerprint, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Hash of one full block. `token_ids`: little-endian int32 bytes, block_size * 4 of them. 16 bytes."""
    return hashlib.blake2b(parent + token_ids, digest_size=HASH_BYTES).digest()


def chain_hashes(root: bytes, token_ids: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Hashes of all full blocks of a prompt. `token_ids`: int32 [num_tokens]; returns num_tokens // block_size of them."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = block_size * 4
    hashes, parent = [], root
    for start in range(0, len(data) - width + 1, width):
        parent = block_hash(parent, data[start : start + width])
        hashes.append(parent)
    return hashes
