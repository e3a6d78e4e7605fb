"""Content hashes of full KV blocks: the key of every prefix cache, the same in every process.

hash(block i) = blake2b-128(hash(block i-1) || token ids of block i as little-endian int32);
the chain starts from blake2b-128(salt length || salt || model fingerprint), so caches of two models or two salts never meet.
"""

import hashlib

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16
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


def extend_chains(chains: list[list[bytes]], token_ids: bytes, block_size: int) -> None:
    """Appends one block's hash to each chain, whose last entry is the parent. `token_ids`: the blocks', one after the other."""
    width, copy = block_size * 4, _EMPTY.copy
    for chain, start in zip(chains, range(0, len(token_ids), width), strict=True):
        state = copy()
        state.update(chain[-1] + token_ids[start : start + width])
        chain.append(state.digest())


def chain_hashes(root: bytes, token_ids: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Hashes of all full blocks of a prompt. `token_ids`: int32 [num_tokens]; returns num_tokens // block_size of them."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = block_size * 4
    chain = [root]
    for start in range(0, len(data) - width + 1, width):
        chain.append(block_hash(chain[-1], data[start : start + width]))
    return chain[1:]
