"""The arithmetic model: a fake whose tokens and KV can be worked out by hand, and which reads every cache entry it
depends on.

    kv[position] = (token_id + 1) * (position + 1)                     one int64 per token, in the paged cache
    next token   = S * 742938285 mod 2147483647 mod vocab_size         S = sum of kv over positions 0 .. last
                   with a temperature above 0: S + seed * (i + 1)      i = index of the next token in the whole answer

Example, vocab_size 32000, prompt [4, 2, 9]: kv = [5*1, 3*2, 10*3] = [5, 6, 30], S = 41, and the next token is 18627.
It lands at position 3: kv[3] = 18628*4 = 74512, S = 74553, and the token after it is 26181.

The modulus is a prime larger than any change of one entry that a wrong token can make, so a single wrong entry always
changes the first remainder; the multiplier (a full-period one for that prime) spreads it, so that it escapes the second
only once in vocab_size.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int64
from protocol.messages import TokenLogprobs

PRIME = 2**31 - 1
MULTIPLIER = 742938285
VOCAB_SIZE = 32_000


def kv_layout_fields(block_size: int, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Fields of the KVLayout that this model's cache has in shared memory: one layer, one head, one int64 each for K
    and V.
    """
    model = f"arithmetic-{vocab_size}"
    return {
        "model": model,
        "dtype": "int64",
        "num_layers": 1,
        "num_kv_heads": 1,
        "block_size": block_size,
        "head_dim": 1,
    }


def cache_view(blocks: npt.NDArray[np.uint8]) -> Int64:
    """The K half of raw blocks, uint8 [num_blocks, 16 * block_size], as int64 [num_blocks, block_size]; shares memory.
    V stays unused.
    """
    num_blocks, block_bytes = blocks.shape
    return blocks.view(np.int64).reshape(num_blocks, 2, block_bytes // 16)[:, 0]


def expected_tokens(
    prompt: Iterable[int], num_tokens: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0
) -> list[int]:
    """The `num_tokens` tokens that a correct engine answers to `prompt`, computed without a cache. `seed`: 0 without a
    temperature.
    """
    total = num_known = 0
    for num_known, token_id in enumerate(prompt, 1):
        total += (int(token_id) + 1) * num_known
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append((total + seed * (len(answer) + 1)) * MULTIPLIER % PRIME % vocab_size)
        num_known += 1
        total += (answer[-1] + 1) * num_known
    return answer


def expected_logprobs(token_id: int, num_top: int, vocab_size: int = VOCAB_SIZE) -> TokenLogprobs:
    """What the arithmetic runner says of a token it chose: -(token_id mod 8), and one less for each token id after
    it.
    """
    chosen = -float(token_id % 8)
    top_token_ids = tuple((token_id + rank) % vocab_size for rank in range(num_top))
    return TokenLogprobs(chosen, top_token_ids, tuple(chosen - rank for rank in range(num_top)))
