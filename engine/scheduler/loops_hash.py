"""The hash of one block for the loops: blake2b-128 as in RFC 7693, over the parent's hash and the block's tokens.

hashlib takes three times as long, most of it for objects, and a step of 1,024 sequences fills 64 blocks. Where numba is
absent, hashlib is used all the same.
"""

from typing import Any, NewType

import numpy as np

from jit.loops_compile import compiled_loop
from protocol import block_hash
from protocol.arrays import Int32, UInt64
from protocol.block_hash import HASH_BYTES, HASH_WORDS

SOURCES = (__file__, block_hash.__file__)

Chain = NewType("Chain", Int32)
"""A root hash and the hashes of n blocks, each the parent of the next: [n + 1, 4]."""

_START = np.array(
    [
        *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
        *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
    ],
    np.uint64,
)
"""The initialization vector, RFC 7693, 2.6."""
_PARAMETERS = np.uint64(0x01010000 | HASH_BYTES)
"""The parameter block, RFC 7693, 2.5: no key, no tree, and a hash of HASH_BYTES bytes."""
_ORDER = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ],
    np.uint8,  # unsigned, so that no index counts from the end
)
"""The order in which each round takes the words of the message, RFC 7693, 2.7. Rounds 10 and 11 begin again."""
NUM_ROUNDS = 12

STATE = 16
ROUNDS = 24
NUM_WORDS = 40
"""Size of the working space: 16 words of the message, 8 of the state, 16 of the rounds."""

_CHUNK = 32
"""How many int32 numbers of the message are compressed at once."""
_HIGH = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@compiled_loop(SOURCES)
def _rotated(word: Any, num_bits: Any) -> Any:
    """Rotates a word to the right."""
    return word >> np.uint64(num_bits) | word << np.uint64(64 - num_bits)


@compiled_loop(SOURCES)
def _mix(words: UInt64, a: int, b: int, c: int, d: int, x: int, y: int) -> None:
    """The mixing function G, RFC 7693, 3.1, with the words `x` and `y` of the message."""
    at_a, at_b, at_c, at_d = words[ROUNDS + a], words[ROUNDS + b], words[ROUNDS + c], words[ROUNDS + d]
    at_a += at_b + words[x]
    at_d = _rotated(at_d ^ at_a, 32)
    at_c += at_d
    at_b = _rotated(at_b ^ at_c, 24)
    at_a += at_b + words[y]
    at_d = _rotated(at_d ^ at_a, 16)
    at_c += at_d
    at_b = _rotated(at_b ^ at_c, 63)
    words[ROUNDS + a], words[ROUNDS + b], words[ROUNDS + c], words[ROUNDS + d] = at_a, at_b, at_c, at_d


@compiled_loop(SOURCES)
def _compress(words: UInt64, num_bytes: int, last: int) -> None:
    """The compression function F, RFC 7693, 3.2: takes 128 bytes of the message into the state.

    `num_bytes` of the message have been seen by now; `last` is true if it ends here.
    """
    for i in range(8):
        words[ROUNDS + i] = words[STATE + i]
        words[ROUNDS + 8 + i] = _START[i]
    words[ROUNDS + 12] ^= np.uint64(num_bytes)
    if last:
        words[ROUNDS + 14] = ~words[ROUNDS + 14]
    for round_ in range(NUM_ROUNDS):
        order = _ORDER[round_ % len(_ORDER)]
        for i in range(4):
            _mix(words, i, 4 + i, 8 + i, 12 + i, order[2 * i], order[2 * i + 1])
        for i in range(4):
            _mix(words, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, order[8 + 2 * i], order[9 + 2 * i])
    for i in range(8):
        words[STATE + i] ^= words[ROUNDS + i] ^ words[ROUNDS + 8 + i]


def _by_hashlib(chain: Chain, block: int, tokens: Int32, words: UInt64) -> None:
    chain[block] = np.frombuffer(block_hash.block_hash(chain[block - 1].tobytes(), tokens.tobytes()), np.int32)


@compiled_loop(SOURCES, uncompiled=_by_hashlib)
def hash_block(chain: Chain, block: int, tokens: Int32, words: UInt64) -> None:
    """Writes chain[block], from the hash before it and the block's tokens. `words` [NUM_WORDS] is working space."""
    for i in range(8):
        words[STATE + i] = _START[i]
    words[STATE] ^= _PARAMETERS
    count = HASH_WORDS + len(tokens)
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        for i in range(16):
            words[i] = 0
        for i in range(start, end):
            word = np.uint64(chain[block - 1, i] if i < HASH_WORDS else tokens[i - HASH_WORDS]) & _LOW
            words[(i - start) // 2] |= word << _HIGH if i % 2 else word
        _compress(words, 4 * end, end == count)
    for i in range(HASH_WORDS):
        word = words[STATE + i // 2]
        chain[block, i] = np.int32(word >> _HIGH if i % 2 else word & _LOW)
