"""Block hashes are the same in every process, and differ for anything that makes KV differ."""

import numpy as np

from protocol.block_hash import block_hash, chain_hashes, root_hash

TOKENS = np.arange(10, dtype=np.int32)


def test_values_are_fixed() -> None:
    """A change here would invalidate the caches of a running deployment of mixed versions."""
    assert root_hash(b"model").hex() == "c70e82d6964171d7a8b10b174a886e9e"
    hashes = chain_hashes(root_hash(b"model"), TOKENS, 4)
    assert [h.hex() for h in hashes] == ["fd3dcbeda9c5363d4ff01327129379e1", "7415d8268c5453826b9a8aeb8799959a"]


def test_only_full_blocks_are_hashed_each_over_its_parent() -> None:
    root = root_hash(b"model")
    first, second = chain_hashes(root, TOKENS, 4)
    assert first == block_hash(root, TOKENS[:4].astype("<i4").tobytes())
    assert second == block_hash(first, TOKENS[4:8].astype("<i4").tobytes())
    assert chain_hashes(root, TOKENS[:3], 4) == []
    assert chain_hashes(root, TOKENS[::2], 2)[0] == block_hash(root, np.array([0, 2], "<i4").tobytes())


def test_salt_and_model_separate_caches() -> None:
    roots = {
        root_hash(b"m"),
        root_hash(b"n"),
        root_hash(b"m", "a"),
        root_hash(b"m", "b"),
        root_hash(b"", "m"),
        root_hash(b"am", ""),
        b"",
    }
    assert len(roots) == 7


def test_the_same_tokens_elsewhere_hash_differently() -> None:
    first, second = chain_hashes(root_hash(b"m"), np.array([1, 2, 1, 2], np.int32), 2)
    assert first != second
