"""Sizes and fingerprints."""

from dataclasses import replace

import pytest

from kv_transfer.layout import KVLayout

LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)


def test_sizes_of_an_8b_model() -> None:
    assert LAYOUT.block_elements == 1_048_576
    assert (LAYOUT.block_bytes, LAYOUT.token_bytes) == (2_097_152, 131_072)
    assert LAYOUT.shape(7) == (7, 8, 32, 2, 16, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"dtype": "float16"},
        {"num_layers": 31},
        {"num_kv_heads": 4},
        {"block_size": 32},
        {"head_dim": 64},
    ],
)
def test_any_difference_changes_the_fingerprint(change: dict[str, int | str]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    assert len(LAYOUT.fingerprint()) == 16
    assert other.fingerprint() != LAYOUT.fingerprint() == replace(LAYOUT).fingerprint()
