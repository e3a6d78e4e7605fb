"""What one KV block looks like in memory, and the fingerprint under which two engines may pair."""

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 2

Blocks = npt.NDArray[np.uint8]
"""A cache in host memory, uint8 [num_blocks, block_bytes]: each row is one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A cache is block-major: one tensor [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim], in
    which a block is one contiguous piece, and so is what a block has of neighbouring heads.
    """

    model: str
    """It is a fingerprint of the weights and not a name: two models of one shape must not pair."""
    dtype: str
    """"bfloat16", "float16", "float32" or "int64"."""
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        return self.block_elements * {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV bytes per token."""
        return self.block_bytes // self.block_size

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    def fingerprint(self) -> bytes:
        """Returns 16 bytes, which are equal exactly when blocks may be copied byte for byte."""
        text = json.dumps({"version": LAYOUT_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
